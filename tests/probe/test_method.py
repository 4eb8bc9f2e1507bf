"""The grammar of methods: what a name means, and which names are none."""

import pytest

from preproj.probe.method import Method, parse_method


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("none", Method()),
        ("full", Method(base="full")),
        ("dense-qkv", Method(base="dense-qkv")),
        ("pre", Method(pre=True)),
        ("skip", Method(skip=True)),
        ("skip-r16", Method(skip=True, skip_rank=16)),
        ("pre+skip", Method(pre=True, skip=True)),
        ("pre+skip-r1", Method(pre=True, skip=True, skip_rank=1)),
        ("lora", Method(lora="lora")),
        ("lora-qkv", Method(lora="lora-qkv")),
        ("lora-r8", Method(lora="lora", lora_rank=8)),
        ("lora-qkv-r960", Method(lora="lora-qkv", lora_rank=960)),
        ("dora", Method(lora="dora")),
        ("dora-r16", Method(lora="dora", lora_rank=16)),
        ("rslora-r16", Method(lora="rslora", lora_rank=16)),
        ("pre+lora", Method(pre=True, lora="lora")),
        ("skip+dora", Method(skip=True, lora="dora")),
        ("pre+skip+lora", Method(pre=True, skip=True, lora="lora")),
        ("pre+skip-r8+lora-qkv-r4", Method(pre=True, skip=True, skip_rank=8, lora="lora-qkv", lora_rank=4)),
    ],
)
def test_a_name_says_its_parts_and_their_ranks(name, method):
    assert parse_method(name) == method


@pytest.mark.parametrize(
    "name",
    [
        *("", "+", "pre+", "+pre", "magic", "Pre", " pre", "pre + skip"),
        *("skip+pre", "lora+pre", "lora+skip", "pre+lora+skip"),  # another order
        *("pre+pre", "skip+skip", "skip+skip-r4", "lora+lora", "lora+dora", "lora-r4+lora-r8"),  # twice
        *("none+pre", "full+lora", "dense-qkv+skip", "pre+none"),  # alone only
        *("pre-r8", "full-r8", "dense-qkv-r8", "none-r1"),  # no rank to name
        *("lora-r", "lora-r0", "lora-r08", "lora-r-8", "lora-r1.5", "lora-r8-r8", "lora-r²", "lora-8", "lora-R8"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_grammar(name):
    with pytest.raises(ValueError, match="is no method: a method is none, full, dense-qkv, or parts joined") as refused:
        parse_method(name)
    assert str(refused.value).startswith(repr(name))
