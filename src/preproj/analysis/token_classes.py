"""Classes of tokens, by the words they belong to.

The rule. The text that the tokens spell is cut into words (letters, digits, ``_`` and apostrophes inside), numbers
(what begins with a digit, as 3.14, 2nd, 1,000) and punctuation (every other mark). A token is of the class of what its
first character that is no space belongs to, so all pieces of a word are of the word's class. A word is a function word
where :data:`FUNCTION_WORDS` has it, or has what stands before its ``n't`` or apostrophe; every other word is a content
word, words of other languages too. Tokens of spaces alone and special tokens are ``other``.

Besides, a token is a ``sentence_start`` where its word or number follows one of ``. ! ? …`` and a space, or an empty
line, and does not begin with a small letter ("e.g. this" begins no sentence, "Mr. Smith" is taken to begin one). The
text's first word is a ``text_start`` and no sentence start: attention sees nothing before it.
"""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

WORD_CLASSES = ("function", "content", "number", "punctuation", "other")
"""They part the tokens: each belongs to one of these."""
STARTS = ("sentence_start", "text_start")
"""Some tokens belong to one of these besides."""
TOKEN_CLASSES = (*WORD_CLASSES, *STARTS)

CLOSED_CLASSES = {
    "articles and determiners": "a an the this that these those each every either neither some any no all both few "
    "many much more most several such other another",
    "pronouns": "i you he she it we they me him her us them my your his its our their mine yours hers ours theirs "
    "myself yourself himself herself itself ourselves yourselves themselves who whom whose which what someone "
    "something anyone anything everyone everything nobody nothing none",
    "prepositions": "of in to for with on at from by about as into like through after over between out against during "
    "without before under around among within along across behind beyond near off onto toward towards upon up down "
    "per via than since until",
    "conjunctions": "and or but nor so yet if because although though while when where whether unless",
    "auxiliary and modal verbs": "be am is are was were been being have has had having do does did doing will would "
    "shall should can could may might must ought won't",
    "closed adverbs": "not there how why",
}
FUNCTION_WORDS = frozenset(word for words in CLOSED_CLASSES.values() for word in words.split())
"""A short list of English's closed classes, in lower case."""

_PIECE = re.compile(r"(?P<number>\d\w*(?:[.,:]\d\w*)*)|(?P<word>_*[^\W\d_]\w*(?:['’]\w+)*)|[^\w\s]|_")
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\s|\n\s*\n")


def token_classes(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Tensor:
    """Return which of :data:`TOKEN_CLASSES` each token belongs to: bool, ``(tokens, classes)``.

    Args:
        tokenizer: that the ids come from.
        ids: token ids of one text.
    """
    spelled = list(_spelled(tokenizer, ids))
    text = "".join(spelled)
    owner: dict[int, set[str]] = {}
    for start, end, names in _pieces(text):
        owner |= dict.fromkeys(range(start, end), names)
    found = torch.zeros(len(ids), len(TOKEN_CLASSES), dtype=torch.bool)
    begin = 0
    for token, part in enumerate(spelled):
        # A token of some bytes of a character spells nothing; the character stands after it.
        seen = range(begin, begin + max(len(part), 1))
        names = next((owner[place] for place in seen if place in owner), {"other"})
        found[token, [TOKEN_CLASSES.index(name) for name in names]] = True
        begin += len(part)
    return found


def _pieces(text: str) -> Iterator[tuple[int, int, set[str]]]:
    """Yield begin, end and classes of every word, number and mark."""
    end = None  # of the word or number before
    for piece in _PIECE.finditer(text):
        kind = piece.lastgroup or "punctuation"
        names = {_word_class(piece[0]) if kind == "word" else kind}
        if kind != "punctuation":
            if end is None:
                names.add("text_start")
            elif not piece[0][0].islower() and _SENTENCE_END.search(text, end, piece.start()):
                names.add("sentence_start")
            end = piece.end()
        yield piece.start(), piece.end(), names


def _word_class(word: str) -> str:
    word = word.lower().replace("’", "'")
    forms = {word, word.removesuffix("n't"), word.partition("'")[0]}
    return "content" if FUNCTION_WORDS.isdisjoint(forms) else "function"


def _spelled(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Iterator[str]:
    """Yield what each token adds to the text; special tokens part it.

    Tokens are decoded with the one before them, because a tokenizer may strip the space of the first.
    """
    special, context, begin = set(tokenizer.all_special_ids), 0, 0
    for position, id in enumerate(ids):
        if id in special:
            yield "\n\n"
            context = begin = position + 1
            continue
        before, now = (_decode(tokenizer, ids[context:end]) for end in (begin, position + 1))
        if now.endswith("\ufffd"):  # more bytes of the character follow
            yield ""
            continue
        yield now[len(before) :]
        context, begin = begin, position + 1


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
