"""The analysis in the terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WEIGHTS = {
    "initial_skip_norm": "‖W_skip⁰‖",
    "skip_norm": "‖W_skip‖",
    "skip_change_norm": "‖W_skip − W_skip⁰‖",
    "skip_change_effective_rank": "its effective rank",
    "pre_norm": "‖pre‖",
    "pre_effective_rank": "its effective rank",
}
FUNCTION = {
    "skip_to_attention": "‖s‖/‖a‖",
    "skip_cosine": "cos(s, a)",
    "skip_share": "s of s + a",
    "pre_to_input": "‖x̃−x̂‖/‖x̂‖",
}

POSITION = {
    "x_hat": "x̂",
    "attn_out": "attention",
    "skip": "skip",
    "entropy": "entropy",
    "base_entropy": "base's",
    "distance": "distance",
    "base_distance": "base's distance",
}


def print_tables(content: dict[str, Any], console: Console) -> None:
    """Print the layers, and how the measures change with depth.

    Args:
        content: of ``analysis.json``.
        console: where to print.
    """
    console.print(_layers("Weights of each layer (pre: the linearised pre-projection)", WEIGHTS, content["layers"]))
    console.print(_layers("Function of each layer (s = W_skip·x̃, a = attention)", FUNCTION, content["layers"]))
    if content["cause"]:
        console.print(_cause(content["cause"]))
    if content["position"]:
        rows = [
            {name: row[name] for name in ("layer", "x_hat", "attn_out", "skip")}
            | {name: attention[name] for name in ("entropy", "base_entropy", "distance", "base_distance")}
            for row, attention in zip(content["position"]["layers"], content["attention"]["layers"], strict=True)
        ]
        console.print(_layers("Variance that position alone explains (ω²), and attention", POSITION, rows))
    table = _table(f"Depth: last layer over the mean of layers 0-{content['early_layers'] - 1}, and Spearman's ρ")
    table.add_column("measure")
    table.add_column("tokens")
    table.add_column("late/early", justify="right")
    table.add_column("ρ", justify="right")
    for row in content["depth"]:
        table.add_row(row["measure"], row["token_class"], _number(row["late_over_early"]), _number(row["spearman"]))
    console.print(table)


def _cause(cause: dict[str, Any]) -> Table:
    """Return what perplexity becomes without each part, for groups of layers and for each layer."""
    table = _table(f"Cause: perplexity, {cause['perplexity']:.2f} intact, rises without a part by")
    for column in ("part", "layers", "Δ", "95 % interval"):
        table.add_column(column, justify="left" if column in ("part", "layers") else "right")
    for row in cause["ablations"]:
        layers = row["group"] or ", ".join(map(str, row["layers"]))
        table.add_row(row["part"], layers, f"{row['value']:+.3g}", f"[{row['low']:+.3g}, {row['high']:+.3g}]")
    return table


def _layers(title: str, titles: dict[str, str], rows: list[dict[str, Any]]) -> Table:
    """Return a table of the measures that the adapter has."""
    shown = {name: title for name, title in titles.items() if any(row[name] is not None for row in rows)}
    table = _table(title)
    for column in ("layer", *shown.values()):
        table.add_column(column, justify="right", min_width=9 if column != "layer" else None)
    for row in rows:
        table.add_row(str(row["layer"]), *(_number(row[name]) for name in shown))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
