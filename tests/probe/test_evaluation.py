"""Scores against plain loops, the host's own loss, and the harness."""

import re

import pytest
import torch
from naive import tiny_model

from preproj.probe.evaluation import score_document, score_last_word, score_stream, windows
from preproj.probe.recipe import Evaluation

IDS = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(0)).tolist()


class Letters:
    """A tokenizer of one token a character; the argmax of the model decides what is right."""

    bos_token_id, eos_token_id = None, 1

    def __call__(self, text, **kwargs):
        return type("Encoding", (), {"input_ids": [ord(c) % 64 for c in text]})

    def decode(self, ids):
        return "".join(chr(i) if i >= 32 else chr(i + 64) for i in ids)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 7), (8, 4), (8, 1), (8, 3), (64, 32)])
def test_every_position_but_the_first_is_scored_once_with_enough_context(length, context, stride):
    scored = []
    for begin, end, first in windows(length, context, stride):
        assert end - 1 - begin <= context
        assert begin < first < end <= length
        if begin:
            assert first - begin > context - stride
        scored += range(first, end)
    assert scored == list(range(1, length))


def test_a_document_within_one_window_has_the_hosts_own_loss():
    model = tiny_model("llama")
    loss, tokens = score_document(model, Letters(), "a", IDS, context=64, stride=32)["perplexity"]
    ids = torch.tensor([[1, *IDS]])  # after the end-of-text token
    assert tokens == 40
    assert loss / 40 == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)


def test_a_long_document_equals_scoring_token_by_token():
    model = tiny_model("gpt_neox")
    context, stride = 16, 8
    whole, expected = [1, *IDS], 0.0
    for position in range(1, len(whole)):
        # Positions 1-16 are in the first window; after that, windows end at 25, 33, 41 and begin 17 before.
        begin = 0 if position <= context else (position - context - 1) // stride * stride + stride
        logits = model(torch.tensor([whole[begin:position]])).logits[0, -1]
        expected -= logits.log_softmax(-1)[whole[position]].item()
    loss, tokens = score_document(model, Letters(), "a", IDS, context, stride)["perplexity"]
    assert loss == pytest.approx(expected, rel=1e-5)
    assert tokens == len(IDS)


def test_words_and_bytes_are_those_of_the_text():
    text = "two words \u00fc"
    ids = [ord(c) % 64 for c in text]

    class Same(Letters):
        def decode(self, ids):
            return text

    item = score_document(tiny_model("llama"), Same(), "a", ids, 16, 8)
    assert item["word_perplexity"] == [item["perplexity"][0], 3]
    assert item["byte_perplexity"] == [item["perplexity"][0], 12]  # u-umlaut takes two bytes
    assert len(re.split(r"\s+", text)) == 3


def test_the_stream_is_one_text_and_stops_at_its_windows():
    model, evaluation = tiny_model("llama"), Evaluation(context=16, stride=8)
    rows = [{"input_ids": IDS[:15]}, {"input_ids": IDS[15:]}]
    items = list(score_stream(model, Letters(), rows, evaluation))
    whole = score_document(model, Letters(), "a", IDS, 16, 8)["perplexity"]
    assert [sum(column) for column in zip(*(item["perplexity"] for item in items), strict=True)] == pytest.approx(whole)
    first = list(score_stream(model, Letters(), rows, evaluation.model_copy(update={"windows": 2})))
    assert first == items[:2]


@pytest.fixture(scope="module")
def greedy():
    """A context and the three characters the model would write."""
    model, tokenizer, context = tiny_model("llama"), Letters(), "the quick brown"
    ids = torch.tensor([tokenizer(context).input_ids])
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)[0, -3:]
    return model, tokenizer, context, tokenizer.decode(written.tolist())


def test_last_word_is_right_where_greedy_decoding_writes_it(greedy):
    model, tokenizer, context, target = greedy
    score = score_last_word(model, tokenizer, context, target)
    assert score["acc"] == [1.0, 1]
    assert score["predicted"] == target


@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_wrong_token_makes_the_word_wrong(greedy, position):
    model, tokenizer, context, target = greedy
    other = "A" if target[position] != "A" else "B"
    wrong = target[:position] + other + target[position + 1 :]
    score = score_last_word(model, tokenizer, context, wrong)
    assert score["acc"] == [0.0, 1]
    logits = model(torch.tensor([tokenizer(context + wrong).input_ids])).logits[0].log_softmax(-1)
    ids = tokenizer(wrong).input_ids
    expected = sum(logits[len(context) - 1 + i, ids[i]].item() for i in range(3))
    assert score["log_probability"] == pytest.approx(expected, rel=1e-5)
