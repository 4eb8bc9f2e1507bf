"""Reads a run folder (`docs/run-folder.md`) into the records of the report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast

import yaml

from preproj.report.fields import AGAIN, ANALYSIS_VERSION, Fields, ReportError, read_json, read_lines, read_text
from preproj.report.records import (
    Ablation,
    Analysis,
    Base,
    CellsEnvironment,
    Corpus,
    Environment,
    Hardware,
    Interaction,
    Interval,
    Layer,
    Measure,
    Pair,
    Published,
    Result,
    Row,
    Run,
    Split,
    Step,
    Trial,
    Tuning,
)


def load(run_dir: Path) -> Run:
    """Reads everything the report needs from a run folder.

    Args:
        run_dir: The folder that `preproj probe` wrote.

    Returns:
        The run; failed and missing cells are rows without a result.

    Raises:
        ReportError: If a file is missing, wrong, or of a newer format.
    """
    if not run_dir.is_dir():
        raise ReportError(f"{run_dir} is not a folder; give the folder that `preproj probe` wrote.")
    summary = read_json(run_dir / "summary.json")
    if summary.whole("format_version") == 1:
        raise ReportError(f"{run_dir} holds a summary of format 1; {AGAIN}, and brings it up to date.")
    base, protocol = summary.child("base"), summary.child("protocol")
    baseline = summary.optional_text("baseline")
    methods = {method.text("method"): method.child("scores") for method in summary.children("methods")}
    rows = tuple(_row(row, run_dir) for row in summary.children("rows"))
    return Run(
        name=summary.text("name"),
        base=Base(base.text("name"), base.text("dtype"), base.whole("parameters"), base.optional_text("note")),
        protocol={name: protocol.text(name) for name in protocol.data} | _analysed(rows),
        baseline=baseline,
        reference=summary.optional_text("reference"),
        measures=tuple(map(_measure, summary.children("measures"))),
        rows=rows,
        scores={name: _intervals(scores) for name, scores in methods.items()},
        pairs=tuple(map(_pair, summary.children("pairs"))),
        interactions=tuple(
            Interaction(found.text("name"), _intervals(found.child("differences")))
            for found in summary.children("interactions")
        ),
        published=tuple(_published(summary.child("published"), baseline or "none")),
        precision_warning=(
            summary.child("precision").optional_text("warning") if summary.data.get("precision") is not None else None
        ),
        tuning=_tuning(summary.child("tuning")) if summary.data.get("tuning") is not None else None,
        environments=tuple(
            map(_cells_environment, summary.children("environments") if "environments" in summary.data else ())
        ),
        environment=_environment(read_json(run_dir / "environment.json")),
        corpus=_corpus(read_json(run_dir / "corpus.json")),
        recipe=read_recipe(run_dir / "recipe.yaml")[0],
    )


def read_recipe(path: Path) -> tuple[str, Fields]:
    """Reads the recipe of a run.

    Args:
        path: `recipe.yaml` of the run folder.

    Returns:
        Its text and its fields.

    Raises:
        ReportError: If it is missing or holds no recipe.
    """
    text = read_text(path)
    try:
        recipe = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ReportError(f"{path} is not YAML; {AGAIN}.") from error
    if not isinstance(recipe, dict):
        raise ReportError(f"{path} holds no recipe; {AGAIN}.")
    return text, Fields(recipe, str(path))


def _environment(fields: Fields) -> Environment:
    hardware, packages = fields.child("hardware"), fields.child("packages")
    return Environment(
        started=fields.text("started"),
        packages={name: packages.text(name) for name in packages.data},
        git_commit=fields.optional_text("git_commit"),
        hardware=Hardware(
            device=hardware.text("device"),
            device_name=hardware.text("device_name"),
            cpu=hardware.text("cpu"),
            cores=hardware.whole("cores"),
            memory_bytes=hardware.whole("memory_bytes"),
            platform=hardware.text("platform"),
        ),
        threads=fields.whole("threads"),
        continued=tuple((start.text("started"), start.texts("changes")) for start in fields.children("continued"))
        if "continued" in fields.data
        else (),
    )


def _cells_environment(fields: Fields) -> CellsEnvironment:
    ran_with = fields.child("with")
    return CellsEnvironment(fields.texts("cells"), {name: ran_with.text(name) for name in ran_with.data})


def _corpus(fields: Fields) -> Corpus:
    splits = fields.child("splits")
    sizes = {name: splits.child(name) for name in splits.data}
    return Corpus(
        source=fields.text("source"),
        description=fields.text("description"),
        sha256=fields.text("sha256"),
        split_rule=fields.text("split_rule"),
        splits={
            name: Split(size.whole("documents"), size.whole("characters"), size.whole("tokens"))
            for name, size in sizes.items()
        },
    )


def _row(fields: Fields, run_dir: Path) -> Row:
    method, seed, status = fields.text("method"), fields.whole("seed"), fields.text("status")
    if status not in ("finished", "failed", "missing"):
        raise ReportError(f"{fields.where}: 'status' is {status!r}, which is no known status; {AGAIN}.")
    # The method names a folder, so it must not lead out of the run.
    if Path(method).name != method:
        raise ReportError(f"{fields.where}: 'method' is {method!r}, which cannot name a folder; rename it.")
    return Row(
        method=method,
        seed=seed,
        status=cast(Literal["finished", "failed", "missing"], status),
        reason=fields.optional_text("reason"),
        notes=fields.texts("notes"),
        result=_result(fields, run_dir / "cells" / method / f"seed{seed}") if status == "finished" else None,
    )


def _result(fields: Fields, cell: Path) -> Result:
    metrics = read_json(cell / "metrics.json")
    scores = fields.child("scores")
    analysis = _analysis(cell / "analysis" / "analysis.json")
    # The untouched model takes no steps and so writes no training log.
    training = read_lines(cell / "training.jsonl") if metrics.whole("steps") else ()
    return Result(
        trainable_parameters=fields.whole("trainable_parameters"),
        share_of_total=fields.number("share_of_total"),
        learning_rate=fields.optional_number("learning_rate"),
        tokens_per_second=fields.optional_number("tokens_per_second"),
        peak_memory_bytes=fields.whole("peak_memory_bytes"),
        seconds=fields.number("seconds"),
        scores={name: scores.number(name) for name in scores.data},
        token_order=metrics.optional_text("token_order_sha256"),
        layers=tuple(_layer(layer, place, analysis) for place, layer in enumerate(metrics.children("layers"))),
        training=tuple(Step(step.whole("tokens"), step.number("loss")) for step in training),
        analysis=analysis,
    )


def _analysis(file: Path) -> Analysis | None:
    """What `preproj analyze` left in a cell, if it ran there and measured causes."""
    if not file.is_file():
        return None
    content = read_json(file, ANALYSIS_VERSION, f"run `preproj analyze {file.parent.parent}` again")
    if content.data.get("cause") is None:
        return None
    cause, text = content.child("cause"), content.child("text")
    return Analysis(
        f"{cause.whole('documents')} pieces of {cause.whole('window')} tokens of {text.text('source')} "
        f"(SHA-256 {text.text('sha256')[:12]}…)",
        tuple(_ablation(row) for row in cause.children("ablations")),
    )


def _ablation(fields: Fields) -> Ablation:
    part = fields.text("part")
    if part not in ("skip", "pre_projection"):
        raise ReportError(f"{fields.where}: 'part' is {part!r}, which is no known part; {fields.again}.")
    return Ablation(
        cast(Literal["skip", "pre_projection"], part),
        fields.optional_text("group"),
        fields.wholes("layers"),
        _interval(fields),
    )


def _analysed(rows: tuple[Row, ...]) -> dict[str, str]:
    """The protocol of the ablations, where there are any."""
    texts = dict.fromkeys(row.result.analysis.text for row in rows if row.result and row.result.analysis)
    if not texts:
        return {}
    return {
        "ablations": (
            "Perplexity without a part is that of `preproj analyze`, less that of the intact adapter, on "
            f"{' and, for other cells, on '.join(texts)}; intervals are a paired bootstrap over pieces, 95 %."
        )
    }


def _measure(fields: Fields) -> Measure:
    kind = fields.text("kind")
    if kind not in ("accuracy", "perplexity"):
        raise ReportError(f"{fields.where}: 'kind' is {kind!r}, which is no known kind; {AGAIN}.")
    return Measure(
        name=fields.text("name"),
        task=fields.text("task"),
        metric=fields.text("metric"),
        kind=cast(Literal["accuracy", "perplexity"], kind),
        items=fields.whole("items"),
    )


def _pair(fields: Fields) -> Pair:
    if "differs" in fields.data:
        differs = fields.texts("differs")
    else:  # a summary that says of the sizes only whether they match
        differs = () if fields.data.get("matched") is True else ("parameters",)
    return Pair(fields.text("ours"), fields.text("theirs"), differs, _intervals(fields.child("differences")))


def _published(fields: Fields, baseline: str) -> Iterator[Published]:
    """What others published of the model: of the untouched one by measure, and the paper's table by method."""
    if "baseline" in fields.data:
        known = fields.child("baseline")
        scores = known.child("scores")
        for name in scores.data:
            value = scores.child(name).number("value")
            yield Published(baseline, name.replace("/", " "), value, name, known.text("source"), paper=False)
    if "paper" in fields.data:
        paper = fields.child("paper")
        methods, measures = paper.child("methods"), paper.child("measures")
        for method in methods.data:
            numbers = methods.child(method)
            for what in numbers.data:
                measure = measures.text(what) if what in measures.data else None
                yield Published(method, what, numbers.number(what), measure, paper.text("source"), paper=True)


def _intervals(fields: Fields) -> dict[str, Interval]:
    """Intervals by name of the measure."""
    return {name: _interval(fields.child(name)) for name in fields.data}


def _interval(fields: Fields) -> Interval:
    p_holm, detectable = (
        fields.optional_number(name) if name in fields.data else None for name in ("p_holm", "detectable")
    )
    over_seeds = None
    # Its ends are null where there are too few seeds.
    if "over_seeds" in fields.data and (over := fields.child("over_seeds")).data.get("low") is not None:
        over_seeds = Interval(over.number("mean"), over.number("low"), over.number("high"))
    value, low, high = (fields.number(name) for name in ("value", "low", "high"))
    return Interval(value, low, high, p_holm, detectable, over_seeds)


def _tuning(fields: Fields) -> Tuning:
    trials = []
    for trial in fields.children("trials"):
        parameters = trial.child("parameters")
        trials.append(
            Trial(
                method=trial.text("method"),
                parameters={name: parameters.number(name) for name in parameters.data},
                value=trial.optional_number("value"),
                reason=trial.optional_text("reason"),
                chosen=trial.data.get("chosen") is True,
            )
        )
    return Tuning(fields.text("measure"), tuple(trials))


def _layer(fields: Fields, place: int, analysis: Analysis | None) -> Layer:
    ablations = analysis.ablations if analysis else ()
    without = {one.part: one.rise for one in ablations if one.group is None and one.layers == (place,)}
    return Layer(
        layer=fields.whole("layer"),
        site=fields.text("site"),
        skip_norm=fields.optional_number("skip_norm"),
        initial_skip_norm=fields.optional_number("initial_skip_norm"),
        skip_to_attention=fields.optional_number("skip_to_attention"),
        pre_to_input=fields.optional_number("pre_to_input"),
        without_skip=without.get("skip"),
        without_pre=without.get("pre_projection"),
    )
