"""Scores against plain loops and the host's own loss."""

import pytest
import torch
from naive import tiny_model

from preproj.probe.evaluation import score_document, score_last_word, windows

IDS = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize(("context", "stride"), [(8, 7), (8, 4), (8, 1), (8, 3), (64, 32)])
def test_every_position_but_the_first_is_scored_once_with_enough_context(length, context, stride):
    scored = []
    for begin, end, first in windows(length, context, stride):
        assert end - begin <= context
        assert begin < first < end <= length
        if begin:
            assert first - begin >= context - stride
        scored += range(first, end)
    assert scored == list(range(1, length))


def test_a_document_within_one_window_has_the_hosts_own_loss():
    model = tiny_model("llama")
    score = score_document(model, IDS, context=64, stride=32)
    ids = torch.tensor([IDS])
    assert score["tokens"] == 39
    assert score["negative_log_likelihood"] / 39 == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)


def test_a_long_document_equals_scoring_token_by_token():
    model = tiny_model("gpt_neox")
    context, stride = 16, 8
    expected = 0.0
    for position in range(1, len(IDS)):
        # Positions 1-15 are in the first window; after that, windows end at 24, 32, 40 and begin 16 before.
        begin = 0 if position < context else (position - context) // stride * stride + stride
        logits = model(torch.tensor([IDS[begin:position]])).logits[0, -1]
        expected -= logits.log_softmax(-1)[IDS[position]].item()
    score = score_document(model, IDS, context, stride)
    assert score["negative_log_likelihood"] == pytest.approx(expected, rel=1e-5)
    assert score["tokens"] == len(IDS) - 1


class Letters:
    """A tokenizer of one token a character; the argmax of the model decides what is right."""

    def __call__(self, text, **kwargs):
        return type("Encoding", (), {"input_ids": [ord(c) % 64 for c in text]})

    def decode(self, ids):
        return "".join(chr(i) if i >= 32 else chr(i + 64) for i in ids)


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
    assert score["correct"]
    assert score["predicted"] == target


@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_wrong_token_makes_the_word_wrong(greedy, position):
    model, tokenizer, context, target = greedy
    other = "A" if target[position] != "A" else "B"
    wrong = target[:position] + other + target[position + 1 :]
    score = score_last_word(model, tokenizer, context, wrong)
    assert not score["correct"]
    logits = model(torch.tensor([tokenizer(context + wrong).input_ids])).logits[0].log_softmax(-1)
    ids = tokenizer(wrong).input_ids
    expected = sum(logits[len(context) - 1 + i, ids[i]].item() for i in range(3))
    assert score["log_probability"] == pytest.approx(expected, rel=1e-5)
