"""Token classes of sentences labelled by hand."""

import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from preproj.analysis.token_classes import STARTS, TOKEN_CLASSES, WORD_CLASSES, token_classes


def tokenizer_of(*pieces: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that also knows these pieces whole; it spells all else byte by byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = {c: i for i, c in enumerate(["<eos>", *alphabet])}, []
    for piece in pieces:
        whole = piece.replace(" ", "Ġ")
        for end in range(2, len(whole) + 1):
            merges.append((whole[: end - 1], whole[end - 1]))
            vocabulary.setdefault(whole[:end], len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


BYTES = tokenizer_of()


def classes_of(text: str, tokenizer: PreTrainedTokenizerFast = BYTES) -> list[set[str]]:
    """The classes of each token of a text."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return [
        {name for name, belongs in zip(TOKEN_CLASSES, row, strict=True) if belongs}
        for row in token_classes(tokenizer, ids).tolist()
    ]


def by_word(text: str) -> list[str]:
    """The class of each part between spaces, which all of its bytes have to have, with + for a start of a sentence."""
    classes = classes_of(text)
    found = []
    for part in re.finditer(r"\S+", text):
        (names,) = {frozenset(names) for names in classes[part.start() : part.end()]}
        (kind,) = names & {*WORD_CLASSES}
        found.append(kind + "+" * bool(names & {*STARTS}))
    return found


def test_a_sentence_labelled_by_hand():
    text = "The heavy door , which cost 1,250.50 dollars , didn't open . Nobody had 3 keys ; it's a 2nd-rate lock !"
    # A part of two classes is left out of by_word's text below.
    labelled = (
        "function+ content content punctuation function content number content punctuation function content "
        "punctuation function+ function number content punctuation function function number content punctuation"
    )
    assert by_word(text.replace("2nd-rate", "2nd")) == labelled.split()


def test_marks_are_punctuation_also_within_a_word_without_spaces():
    assert [min(names & {*WORD_CLASSES}) for names in classes_of("a-b_c.")] == [
        "function",
        "punctuation",
        *["content"] * 3,  # a name with an underscore is one word
        "punctuation",
    ]


def test_all_pieces_of_a_word_have_its_class_and_space_goes_with_what_follows():
    tokenizer = tokenizer_of(" the", " wat", "The")
    ids = tokenizer("The the waterfall", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["The", "Ġthe", "Ġwat", *"erfall"]
    classes = classes_of("The the waterfall", tokenizer)
    assert classes == [{"function", "text_start"}, {"function"}, *[{"content"}] * 7]


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("He left. She stayed.", ["She"]),
        ('"Go!" He went... Then "Why?" (Nobody asked.)', ["He", "Then", "Nobody"]),
        ("See e.g. this. 12 came", ["12"]),
        ("A title\n\nIts text", ["Its"]),
        ("one line\nAnother line", []),
        ("version 3.11 and a.B", []),
    ],
)
def test_sentences_start_after_their_ends_and_empty_lines(text, starts):
    classes = classes_of(text)
    found = [w[0] for w in re.finditer(r"\w+", text) if "sentence_start" in classes[w.start()]]
    assert found == starts
    first = re.search(r"\w+", text)
    assert first
    assert {i for i, names in enumerate(classes) if "text_start" in names} == {*range(*first.span())}


def test_spaces_alone_and_special_tokens_are_other():
    assert classes_of("if  x")[2] == {"other"}
    ids = [0, *BYTES("So", add_special_tokens=False).input_ids]
    found = token_classes(BYTES, ids)
    assert [TOKEN_CLASSES[i] for i in found[0].nonzero()] == ["other"]
    assert found[1:].equal(torch.stack([token_classes(BYTES, ids[1:])[0]] * 2))


def test_the_bytes_of_a_character_belong_to_its_word():
    assert classes_of("a Größe")[2:] == [{"content"}] * 7  # ö and ß are two bytes each
    cut = BYTES("Gr\u00f6", add_special_tokens=False).input_ids[:-1]  # within the ö
    assert token_classes(BYTES, cut)[-1].nonzero().flatten().tolist() == [TOKEN_CLASSES.index("other")]


def test_every_token_belongs_to_one_class_of_words():
    found = token_classes(BYTES, BYTES("Well,  the 3 «Größen» — don't!\n\nYes.").input_ids)
    assert found[:, : len(WORD_CLASSES)].sum(1).unique().tolist() == [1]


def test_a_tokenizer_that_strips_the_first_space_keeps_words_apart():
    """In the manner of SentencePiece: ▁ begins a word, and the decoder drops it from the first token."""
    vocabulary = {"<eos>": 0, "▁the": 1, "▁door": 2, "s": 3, "▁of": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Metaspace()
    metaspace = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    assert metaspace.decode([1]) == "the"
    found = token_classes(metaspace, [1, 2, 3, 4])
    assert [TOKEN_CLASSES[row.nonzero()[0]] for row in found] == ["function", "content", "content", "function"]
