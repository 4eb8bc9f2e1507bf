"""Find the demo's learning rates on the validation split: every method, the same grid.

    python benchmarks/tune_demo.py

Runs the embedded demo's recipe once per learning rate with all methods, scored on the validation split only, and
writes results/demo-tuning/. The runs are resumable: call it again after an interruption. About an hour and a half on
two cores.
"""

from pathlib import Path

from rich.console import Console

from preproj.probe.files import read_json, write_json, write_text
from preproj.probe.recipe import Recipe, load_recipe
from preproj.probe.runner import run_probe

METHODS = ("pre", "skip", "pre+skip", "lora", "lora-qkv", "pre+lora", "pre+skip+lora")
GRID = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
DOCUMENTS = 24
RUNS = Path("runs/demo-tuning")
RESULTS = Path("results/demo-tuning")


def trial(demo: Recipe, learning_rate: float) -> Recipe:
    """Return the demo's recipe at one learning rate for every method, scored on the validation split."""
    return Recipe.model_validate(
        demo.model_dump()
        | {
            "name": f"demo-tuning-{learning_rate:g}",
            "methods": list(METHODS),
            "training": demo.training.model_dump() | {"learning_rate": dict.fromkeys(METHODS, learning_rate)},
            "evaluation": demo.evaluation.model_dump() | {"split": "validation", "documents": DOCUMENTS, "passages": 0},
        }
    )


def main() -> None:
    """Run every trial, and write the table and the best learning rate of each method."""
    demo, console = load_recipe(None), Console()
    perplexity: dict[str, dict[str, float | None]] = {}
    for learning_rate in GRID:
        recipe = trial(demo, learning_rate)
        run_probe(recipe, RUNS / f"{learning_rate:g}", console)
        for row in read_json(RUNS / f"{learning_rate:g}" / "summary.json")["rows"]:
            scores = row.get("scores", {})
            perplexity.setdefault(row["method"], {})[f"{learning_rate:g}"] = scores.get("document/perplexity")
    best = {
        method: min((value, rate) for rate, value in trials.items() if value is not None)[1]
        for method, trials in perplexity.items()
    }
    environment = read_json(RUNS / f"{GRID[0]:g}" / "environment.json")
    record = {
        "split": "validation",
        "training": trial(demo, GRID[0]).training.model_dump(exclude={"learning_rate"}),
        "evaluation": trial(demo, GRID[0]).evaluation.model_dump(),
        "perplexity": perplexity,
        "best": best,
        "environment": environment,
    }
    write_json(RESULTS / "tuning.json", record)
    rates = [f"{rate:g}" for rate in GRID]
    lines = [
        "# Learning rates of the demo",
        "",
        "Perplexity on the demo's **validation** split after the demo's own training budget, one seed, the same "
        f"{len(GRID)} trials for every method; the best is in bold and is what the demo uses. Made by "
        "`python benchmarks/tune_demo.py`; versions and hardware are in `tuning.json`.",
        "",
        "| method | " + " | ".join(rates) + " |",
        "|---|" + "---|" * len(rates),
    ]
    for method, trials in perplexity.items():
        cells = ["failed" if trials[rate] is None else f"{trials[rate]:.2f}" for rate in rates]
        cells = [f"**{cell}**" if rate == best[method] else cell for rate, cell in zip(rates, cells, strict=True)]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    write_text(RESULTS / "README.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
