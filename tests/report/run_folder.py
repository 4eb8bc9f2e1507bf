"""A synthetic run folder, exactly to `docs/run-folder.md`, with numbers that no two cells share."""

import json
import math
import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

METHODS = ("none", "pre", "skip", "pre+skip", "lora", "lora-qkv")
PERPLEXITY = {"none": 34.12, "pre": 33.4, "skip": 32.6, "pre+skip": 31.83, "lora": 31.9, "lora-qkv": 32.25}
ACCURACY = {"none": 0.352, "pre": 0.353, "skip": 0.371, "pre+skip": 0.389, "lora": 0.362, "lora-qkv": 0.3641}
PARAMETERS = {
    "none": 0,
    "pre": 17_700_864,
    "skip": 7_077_888,
    "pre+skip": 24_778_752,
    "lora": 1_179_648,
    "lora-qkv": 884_736,
}
BASE = 162_322_944
NOTE = "The weights were rounded to 8 bits on their way here, so the untouched model is a little worse than published."
SIZE_NOTE = "This method has 21 times the trainable parameters of lora."
MEASURES = {"document/perplexity": "perplexity", "last_word/acc": "accuracy"}
HALF_WIDTH = {"document/perplexity": 0.21, "last_word/acc": 0.013}


def write_run(
    folder: Path,
    methods: Sequence[str] = METHODS,
    seeds: Sequence[int] = (0,),
    failed: Sequence[str] = (),
    missing: Sequence[str] = (),
    note: str | None = NOTE,
    reason: str = "The loss became NaN at step 12.",
    baseline: str | None = "none",
    reference: str | None = "lora",
    last_word: bool = True,
    precision: dict[str, Any] | None = None,
    published: dict[str, Any] | None = None,
    steps: int = 60,
    layers: int = 6,
    analysed: Sequence[str] = (),
) -> Path:
    """Writes the folder of a run whose cells have the numbers above, shifted a little by seed."""
    folder.mkdir(parents=True)
    cells = [(m, s) for m in methods for s in (seeds[:1] if m == "none" else seeds)]
    rows = []
    for method, seed in cells:
        row: dict[str, Any] = {"method": method, "seed": seed, "reason": None}
        row["notes"] = [SIZE_NOTE] if method == "pre+skip" else []
        row["status"] = "failed" if method in failed else "missing" if method in missing else "finished"
        if method in failed:
            row["reason"] = reason
        if row["status"] == "finished":
            row |= _numbers(method, seed)
            if not last_word:
                del row["scores"]["last_word/acc"]
            cell = folder / "cells" / method / f"seed{seed}"
            _write_cell(cell, method, seed, row, steps, layers)
            if method in analysed:
                _write_analysis(cell / "analysis", method, seed, layers)
        rows.append(row)
    finished = [m for m in methods if m not in failed and m not in missing]
    names = [name for name in MEASURES if last_word or name != "last_word/acc"]
    write_json(
        folder / "summary.json",
        {
            "name": folder.name,
            "base": {"name": "pythia-160m", "dtype": "float32", "parameters": BASE, "note": note},
            "protocol": {
                "training": "One pass over 800,000 tokens at the same batch size for every method.",
                "document": "Token-weighted over 48 test documents in windows of 512 tokens.",
                "intervals": "Paired bootstrap over documents, 95 %; they say nothing of seeds.",
            },
            "baseline": baseline,
            "reference": reference,
            "measures": [
                {"name": name, "task": name.split("/")[0], "metric": name.split("/")[1], "kind": MEASURES[name]}
                | {"items": 400}
                for name in names
            ],
            "rows": rows,
            "methods": [
                {"method": method, "seeds": list(seeds), "scores": {n: _score(method, n, seeds) for n in names}}
                for method in finished
            ],
            "pairs": [
                {
                    "ours": ours,
                    "theirs": theirs,
                    "differs": _differs(ours, theirs),
                    "matched": not _differs(ours, theirs),
                    "differences": {name: _difference(ours, theirs, name, seeds) for name in names},
                }
                for theirs, ours in combinations(finished, 2)
            ],
            "interactions": [],
            "precision": precision,
            "published": published or {},
        },
    )
    _write_record(folder, methods, seeds)
    return folder


def write_json(path: Path, data: dict[str, Any], version: int = 2) -> None:
    path.write_text(json.dumps({"format_version": version, **data}), encoding="utf-8")


def _size(method: str) -> int:
    return PARAMETERS.get(method, 5_000_000)


def _differs(ours: str, theirs: str) -> list[str]:
    return [] if abs(_size(ours) - _size(theirs)) <= 0.02 * _size(ours) else ["parameters"]


def _value(method: str, name: str, seed: int) -> float:
    trained = method != "none"
    if name == "last_word/acc":
        return ACCURACY.get(method, 0.357) - 0.004 * seed * trained
    return PERPLEXITY.get(method, 33.0) + 0.11 * seed * trained


def _mean(method: str, name: str, seeds: Sequence[int]) -> float:
    return sum(_value(method, name, seed) for seed in seeds) / len(seeds)


def _score(method: str, name: str, seeds: Sequence[int]) -> dict[str, float]:
    value = _mean(method, name, seeds)
    return {"value": value, "low": value - 3 * HALF_WIDTH[name], "high": value + 3 * HALF_WIDTH[name]}


def _difference(ours: str, theirs: str, name: str, seeds: Sequence[int]) -> dict[str, float]:
    value, half = _mean(ours, name, seeds) - _mean(theirs, name, seeds), HALF_WIDTH[name]
    tests = {"p": 0.021, "p_holm": 0.042, "detectable": 1.4 * half}
    return {"value": value, "low": value - half, "high": value + 1.1 * half, **tests}


def _numbers(method: str, seed: int) -> dict[str, Any]:
    size, trained = _size(method), method != "none"
    index = METHODS.index(method) if method in METHODS else 7
    return {
        "trainable_parameters": size,
        "share_of_total": size / (BASE + size),
        "learning_rate": 1e-3 if trained else None,
        "tokens": 819_180 if trained else 0,
        "tokens_per_second": 3210.0 + 97 * index if trained else None,
        "peak_memory_bytes": 1_700_000_000 + index * 137_000_000,
        "seconds": 301.0 + 43 * index + seed,
        "scores": {name: _value(method, name, seed) for name in MEASURES},
    }


def _write_cell(cell: Path, method: str, seed: int, row: dict[str, Any], steps: int, layers: int) -> None:
    cell.mkdir(parents=True)
    steps = steps if method != "none" else 0
    metrics = {key: row[key] for key in ("method", "seed", "notes", "learning_rate", "tokens")} | {
        "trainable_parameters": row["trainable_parameters"],
        "total_parameters": BASE + row["trainable_parameters"],
        "share_of_total": row["share_of_total"],
        "adapter": None if method == "none" else {"type": "PREPROJ", "target_modules": ["attention"]},
        "steps": steps,
        "token_order_sha256": f"order{seed}" if steps else None,
        "dtype": "float32",
        "device": "cpu",
        "seconds": {"train": 250.0, "evaluate": 40.0, "total": row["seconds"]},
        "tokens_per_second": row["tokens_per_second"],
        "peak_memory_bytes": row["peak_memory_bytes"],
        "measures": {"document": {"perplexity": "perplexity"}, "last_word": {"acc": "accuracy"}},
        "layers": _layers(method, seed, layers),
    }
    write_json(cell / "metrics.json", metrics)
    _write_items(cell, method)
    if steps:
        chance = random.Random(f"{method}{seed}")
        target = math.log(row["scores"]["document/perplexity"])
        lines = [
            {
                "step": step,
                "tokens": 13_653 * step,
                "loss": target + 0.5 * math.exp(-step / 12) + chance.gauss(0, 0.08),
                "learning_rate": 1e-3,
                "grad_norm": 1.0,
            }
            for step in range(1, steps + 1)
        ]
        _write_lines(cell / "training.jsonl", lines)


ITEMS = 8


def _write_items(cell: Path, method: str) -> None:
    """Item i is right where bit i of a number is set, one for each method; losses differ from method to method."""
    number = {"lora": 0b00001111, "pre+skip": 0b10000111}.get(method, 0b01010101)
    (cell / "items").mkdir()
    rows = {
        "document": [
            {"id": f"page{i}", "group": f"page{i}", "perplexity": [30.0 + i * len(method), 10]} for i in range(ITEMS)
        ],
        "last_word": [
            {"id": f"page{i}#0", "group": f"page{i}", "target": f" word{i}", "acc": [float(number >> i & 1), 1]}
            | {"predicted": f" word{i}" if number >> i & 1 else f" slip{i}", "log_probability": -1.0}
            for i in range(ITEMS)
        ],
    }
    for task, items in rows.items():
        _write_lines(cell / "items" / f"{task}.jsonl", items)


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _layers(method: str, seed: int, layers: int) -> list[dict[str, Any]]:
    skip, pre = "skip" in method, "pre" in method
    return [
        {
            "layer": layer,
            "site": f"gpt_neox.layers.{layer}.attention",
            "skip_norm": 1.1 + 0.12 * layer + 0.1 * seed if skip else None,
            "initial_skip_norm": 0.0768 if skip else None,
            "skip_to_attention": 0.09 + 0.02 * layer if skip else None,
            "pre_to_input": 0.31 - 0.01 * layer if pre else None,
        }
        for layer in range(layers if skip or pre else 0)
    ]


def _write_analysis(folder: Path, method: str, seed: int, layers: int) -> None:
    """Each layer's skip is worth a tenth more than the one below, its pre-projection nothing."""
    folder.mkdir()
    rows = []
    for part in ("skip", "pre_projection"):
        for group, members in [*((None, [i]) for i in range(layers)), ("late", [layers - 1]), ("all", range(layers))]:
            value = sum(0.1 * i + 0.01 * seed for i in members) if part == "skip" else 0.0
            rows.append({"part": part, "group": group, "layers": list(members), "perplexity": 30 + value})
            rows[-1] |= {"value": value, "low": value - 0.05, "high": value + 0.07, "standard_error": 0.03}
            rows[-1] |= {"detectable": 0.1}
    having = [row for row in rows if row["part"].split("_")[0] in method]
    cause = {"window": 128, "documents": 8, "skipped": 0, "perplexity": 30.0, "ablations": having}
    text = {"source": "pages.txt", "sha256": "0123456789abcdef", "documents": 8, "pieces": 8, "tokens": 1024}
    write_json(folder / "analysis.json", {"cause": cause, "text": text}, 1)


def _write_record(folder: Path, methods: Sequence[str], seeds: Sequence[int]) -> None:
    (folder / "texts").mkdir()
    texts = [{"id": f"page{i}#0", "text": f"Passage {i} ends in <b>this</b>"} for i in range(ITEMS)]
    _write_lines(folder / "texts" / "last_word.jsonl", texts)
    recipe = {"name": folder.name, "model": {"name": "pythia-160m"}, "methods": list(methods), "seeds": list(seeds)}
    (folder / "recipe.yaml").write_text(json.dumps(recipe, indent=2), encoding="utf-8")
    write_json(
        folder / "environment.json",
        {
            "started": "2026-01-02T03:04:05Z",
            "packages": {"preproj": "0.1.0", "torch": "2.13.0", "peft": "0.21.2", "python": "3.11.9"},
            "git_commit": None,
            "hardware": {
                "device": "cpu",
                "device_name": "cpu",
                "cpu": "Example CPU",
                "cores": 2,
                "memory_bytes": 8_589_934_592,
                "platform": "Linux",
            },
            "threads": 2,
        },
    )
    splits = {
        name: {"documents": 40 + i, "characters": 123_456 + i, "tokens": 31_415 + i}
        for i, name in enumerate(("train", "validation", "test"))
    }
    write_json(
        folder / "corpus.json",
        {
            "source": "python-docs",
            "description": "The text of the Python manual.",
            "sha256": "0123456789abcdef" * 4,
            "split_rule": "Each document goes whole into one split.",
            "splits": splits,
        },
    )
