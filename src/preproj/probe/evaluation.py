"""Perplexity of held-out text and last-word accuracy, item by item (see ``scores.py`` for the form of an item)."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from preproj.probe.recipe import Evaluation

PROTOCOLS = {
    "document": (
        "Perplexity of documents ({split} split, at most {documents}, the first {document_tokens} tokens of each): "
        "each document on its own, every token scored once, its first token after the tokenizer's beginning-of-text "
        "token; windows of {context} tokens moved by {stride}; over tokens (perplexity), over words as the harness "
        "counts them (word_perplexity) and over UTF-8 bytes (byte_perplexity)."
    ),
    "document_v1": (
        "Perplexity of documents as run folders of format 1 hold it ({split} split, at most {documents}, the first "
        "{document_tokens} tokens of each): as document, but a document's first token has no context and is not "
        "scored, and a window holds one token less; over tokens."
    ),
    "stream": (
        "Perplexity of the stream: the {split} split's documents one after the other without separators, at most "
        "{windows} windows of {context} tokens moved by {stride}, every token scored once; over tokens."
    ),
}


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    bos_token_id: int | None
    eos_token_id: int | None

    def __call__(self, text: str, **kwargs: Any) -> Any:
        """Return an encoding with ``input_ids``."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""


def perplexity_protocol(name: str, evaluation: Evaluation, split: str) -> str:
    """Say in one sentence how the perplexity of a split is measured."""
    values = {key: "all" if value is None else value for key, value in evaluation.model_dump().items()}
    values["split"] = split
    return PROTOCOLS[name].format(**values)


def prefix_token(tokenizer: Tokenizer) -> int:
    """Return the token that a text's first token is predicted from: beginning of text, else end of text."""
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    assert token is not None  # checked when the text was prepared
    return token


def windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(begin, end, first)``: the model reads ``begin:end - 1`` and positions ``first:end`` are scored.

    Every position but 0 is scored exactly once; after the first window each has at least ``context - stride + 1``
    tokens before it. With ``stride = context`` the windows are those of the harness's rolling log-likelihood.
    """
    first = 1
    for begin in range(0, length, stride):
        end = min(begin + context + 1, length)
        if first < end:
            yield begin, end, first
        first = end
        if end == length:
            return


def score_document(
    model: PreTrainedModel, tokenizer: Tokenizer, name: str, ids: list[int], context: int, stride: int
) -> dict[str, Any]:
    """Return the item of one document: ``perplexity``, ``word_perplexity`` and ``byte_perplexity``.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        name: the document's id.
        ids: its token ids.
        context: tokens the model reads per window.
        stride: tokens the window moves.
    """
    whole = [prefix_token(tokenizer), *ids]
    loss = sum(_loss(model, whole, *window) for window in windows(len(whole), context, stride))
    text = tokenizer.decode(ids)
    return {
        "id": name,
        "group": name,
        "perplexity": [loss, len(ids)],
        "word_perplexity": [loss, len(re.split(r"\s+", text))],
        "byte_perplexity": [loss, len(text.encode())],
    }


def score_stream(
    model: PreTrainedModel, tokenizer: Tokenizer, documents: Iterable[dict[str, Any]], evaluation: Evaluation
) -> Iterator[dict[str, Any]]:
    """Yield one item per window of the documents' concatenated tokens.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        documents: rows with ``input_ids``.
        evaluation: context, stride and the largest number of windows.
    """
    for name, whole, (begin, end, first) in _stream_windows(tokenizer, documents, evaluation):
        loss = _loss(model, whole, begin, end, first)
        yield {"id": name, "group": name, "perplexity": [loss, end - first]}


def stream_parts(
    tokenizer: Tokenizer, documents: Iterable[dict[str, Any]], evaluation: Evaluation
) -> Iterator[tuple[str, list[int]]]:
    """Yield the id of each window of :func:`score_stream` with the tokens that are scored in it."""
    for name, whole, (_, end, first) in _stream_windows(tokenizer, documents, evaluation):
        yield name, whole[first:end]


def _stream_windows(
    tokenizer: Tokenizer, documents: Iterable[dict[str, Any]], evaluation: Evaluation
) -> Iterator[tuple[str, list[int], tuple[int, int, int]]]:
    whole = [prefix_token(tokenizer)]
    for document in documents:
        whole += document["input_ids"]
    for number, window in enumerate(windows(len(whole), evaluation.context, evaluation.stride)):
        if number == evaluation.windows:
            return
        yield str(number), whole, window


def score_last_word(model: PreTrainedModel, tokenizer: Tokenizer, context: str, target: str) -> dict[str, Any]:
    """Return whether the model's argmax gives every token of ``target`` after ``context``, as LAMBADA is scored.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        context: the passage without its last word.
        target: the last word with its leading space.

    Returns:
        ``acc``, ``predicted`` (text of the argmax tokens) and ``log_probability`` of the whole target (nats).
    """
    whole = tokenizer(context + target, add_special_tokens=False).input_ids
    length = len(whole) - len(tokenizer(context, add_special_tokens=False).input_ids)
    log_probabilities = _log_probabilities(model, whole, length)
    targets = torch.tensor(whole[-length:], device=model.device)
    predicted = log_probabilities.argmax(-1)
    return {
        "acc": [float((predicted == targets).all()), 1],
        "predicted": tokenizer.decode(predicted.tolist()),
        "log_probability": log_probabilities.gather(1, targets[:, None]).double().sum().item(),
    }


def _loss(model: PreTrainedModel, ids: list[int], begin: int, end: int, first: int) -> float:
    """Return the summed negative log-likelihood (nats) of one window's scored tokens."""
    log_probabilities = _log_probabilities(model, ids[begin:end], end - first)
    targets = torch.tensor(ids[first:end], device=model.device)
    return -log_probabilities.gather(1, targets[:, None]).double().sum().item()


@torch.inference_mode()
def _log_probabilities(model: PreTrainedModel, ids: list[int], last: int) -> Tensor:
    """Return float32 log-probabilities ``(last, vocab)`` for the last tokens of ``ids``, each given those before."""
    read = torch.tensor([ids[:-1]], device=model.device)
    return model(input_ids=read, use_cache=False).logits[0, -last:].float().log_softmax(-1)
