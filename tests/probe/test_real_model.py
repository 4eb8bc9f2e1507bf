"""The real model: published and independently measured figures, and the demo itself."""

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from preproj.probe.base import PACKAGED, load_config, load_model, load_tokenizer, resolve_base
from preproj.probe.evaluation import score_document, score_last_word
from preproj.probe.files import read_json, read_jsonl
from preproj.probe.prepared import prepare
from preproj.probe.python_docs import python_docs
from preproj.probe.recipe import load_recipe
from preproj.probe.tokenised import text_cache
from preproj.probe.training import block_order

RESULTS = Path(__file__).parents[2] / "results" / "demo"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def smollm2():
    base = resolve_base(PACKAGED)
    return load_model(base, "float32"), load_tokenizer(base)


@pytest.mark.data
def test_wikitext_perplexity_of_the_untouched_model(smollm2, data_folder: Path):
    # 23.2 was measured independently on the same 20 windows of 1,024 tokens of the WikiText test split.
    model, tokenizer = smollm2
    ids = tokenizer((data_folder / "wiki.test.raw").read_text("utf-8")).input_ids
    loss, tokens = 0.0, 0
    for block in (ids[i * 1024 : (i + 1) * 1024] for i in range(20)):
        # There, a window's first token was its context.
        tokenizer = SimpleNamespace(bos_token_id=block[0], decode=lambda _: "")
        item = score_document(model, tokenizer, "", block[1:], 1023, 512)
        loss, tokens = loss + item["perplexity"][0], tokens + item["perplexity"][1]
    assert math.exp(loss / tokens) == pytest.approx(23.2, abs=0.1)


@pytest.mark.data
def test_lambada_accuracy_of_the_untouched_model(smollm2, data_folder: Path):
    # 0.34 was measured independently on the first 200 passages.
    model, tokenizer = smollm2
    texts = [json.loads(line)["text"] for line in (data_folder / "lambada_openai.jsonl").read_text().splitlines()[:200]]
    correct = 0
    for text in texts:
        context, target = text.rsplit(" ", 1)
        correct += score_last_word(model, tokenizer, context, " " + target)["acc"][0]
    assert correct / 200 == pytest.approx(0.34, abs=0.005)


def test_the_demos_blocks_are_those_of_the_published_run():
    base = resolve_base(PACKAGED)
    tokenizer, recipe, corpus = load_tokenizer(base), load_recipe(None), python_docs()
    with text_cache():
        blocks = prepare(recipe, corpus, tokenizer, load_config(base)).blocks
    stream: list[int] = []
    for row in corpus.splits["train"]:
        stream += [*tokenizer(row["text"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert blocks.ravel().tolist() == stream[: blocks.size]
    assert len(stream) - blocks.size < 256 == blocks.shape[1]
    # Another Python carries another text, and then another order of tokens.
    published = read_json(RESULTS / "cells/pre+skip/seed0/trained.json")["token_order_sha256"]
    order = block_order(len(blocks), recipe.training.steps * recipe.training.batch_size, seed=0)
    same_order = hashlib.sha256(blocks[order].astype(np.int64).tobytes()).hexdigest() == published
    assert same_order == (corpus.sha256 == read_json(RESULTS / "corpus.json")["sha256"])


@pytest.mark.timed
def test_the_demo_ends_in_time_and_memory_and_pre_skip_lowers_perplexity(tmp_path: Path):
    # As a newcomer meets it: an empty cache, so the conversion of the weights is in the time.
    environment = {**os.environ, "PREPROJ_CACHE": str(tmp_path / "cache")}
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "preproj", "probe", "--out", str(tmp_path / "run")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - begin
    assert done.returncode == 0, done.stdout + done.stderr
    assert seconds < 15 * 60
    run = tmp_path / "run"
    summary = read_json(run / "summary.json")
    rows = {row["method"]: row for row in summary["rows"]}
    assert list(rows) == ["none", "lora", "pre", "pre+skip"]
    assert all(row["peak_memory_bytes"] < 6e9 for row in rows.values())
    (pair,) = (pair for pair in summary["pairs"] if (pair["ours"], pair["theirs"]) == ("pre+skip", "none"))
    assert pair["differences"]["document/perplexity"]["high"] < 0
    assert rows["pre+skip"]["trainable_parameters"] == 30 * 3.5 * 576 * 576
    assert rows["lora"]["trainable_parameters"] == pytest.approx(rows["pre+skip"]["trainable_parameters"], rel=0.005)
    assert len(read_jsonl(run / "cells/none/seed0/items/document.jsonl")) >= 40
    assert "instruction-tuned" in (run / "report.html").read_text("utf-8")
    assert "instruction-tuned" in done.stdout
