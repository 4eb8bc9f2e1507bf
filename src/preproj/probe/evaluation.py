"""Held-out perplexity and last-word accuracy, item by item."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from preproj.probe.recipe import Evaluation


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        """Return an encoding with ``input_ids``."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""


def perplexity_protocol(evaluation: Evaluation, dtype: str) -> str:
    """Say in one sentence how perplexity is measured."""
    return (
        f"Token-level perplexity over the first {evaluation.document_tokens} tokens of up to {evaluation.documents} "
        f"documents of the {evaluation.split} split, each document on its own, in windows of {evaluation.context} "
        f"tokens moved by {evaluation.stride} so that every token is scored once; a document's first token has no "
        f"context and is not scored; base weights in {dtype}."
    )


def windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(begin, end, first)``: score positions ``first:end`` of the window ``begin:end``.

    Every position but 0 is scored exactly once; after the first window each has at least ``context - stride`` tokens
    before it, so ``stride`` must be less than ``context``.
    """
    first = 1
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        if first < end:
            yield begin, end, first
        first = end
        if end == length:
            return


@torch.inference_mode()
def score_document(model: PreTrainedModel, ids: list[int], context: int, stride: int) -> dict[str, Any]:
    """Return ``tokens`` scored and their summed ``negative_log_likelihood`` (nats).

    Args:
        model: a causal language model in eval mode.
        ids: the document's token ids.
        context: tokens per window.
        stride: tokens the window moves.
    """
    total, count = 0.0, 0
    for begin, end, first in windows(len(ids), context, stride):
        targets = torch.tensor(ids[first:end], device=model.device)
        log_probabilities = _next_token_log_probabilities(model, ids[begin:end], end - first)
        total -= log_probabilities.gather(1, targets[:, None]).double().sum().item()
        count += len(targets)
    return {"tokens": count, "negative_log_likelihood": total}


@torch.inference_mode()
def score_last_word(model: PreTrainedModel, tokenizer: Tokenizer, context: str, target: str) -> dict[str, Any]:
    """Return whether the model's argmax gives every token of ``target`` after ``context``, as LAMBADA is scored.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        context: the passage without its last word.
        target: the last word with its leading space.

    Returns:
        ``predicted`` (text of the argmax tokens), ``correct`` and ``log_probability`` of the whole target (nats).
    """
    whole = tokenizer(context + target, add_special_tokens=False).input_ids
    length = len(whole) - len(tokenizer(context, add_special_tokens=False).input_ids)
    targets = torch.tensor(whole[-length:], device=model.device)
    log_probabilities = _next_token_log_probabilities(model, whole, length)
    predicted = log_probabilities.argmax(-1)
    return {
        "predicted": tokenizer.decode(predicted.tolist()),
        "correct": bool((predicted == targets).all()),
        "log_probability": log_probabilities.gather(1, targets[:, None]).double().sum().item(),
    }


def _next_token_log_probabilities(model: PreTrainedModel, ids: list[int], last: int) -> Tensor:
    """Return float32 log-probabilities ``(last, vocab)`` for the last tokens of ``ids``, each given those before."""
    logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -last - 1 : -1]
    return logits.float().log_softmax(-1)
