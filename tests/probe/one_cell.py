"""One cell in a process of its own that starts at once, and what it must end like."""

import multiprocessing
from pathlib import Path

from preproj.probe.cell import cell_folder
from preproj.probe.files import read_json

METHOD, SEED = "pre+skip", 0
# A server that has imported everything: its children start at once, and torch has not run in it.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["preproj.probe.cell"])


def one_cell(run: str) -> None:
    import torch

    from preproj.probe.cell import cell_folder, run_cell
    from preproj.probe.files import clear_unfinished

    torch.set_num_threads(1)
    clear_unfinished(cell_folder(Path(run), METHOD, SEED))  # as the cell's own process does
    run_cell(Path(run), METHOD, SEED)


def cell_process(run: Path) -> multiprocessing.Process:
    process = CONTEXT.Process(target=one_cell, args=(str(run),))
    process.start()
    return process


def check_equal(run: Path, whole: Path) -> None:
    ours, theirs = (cell_folder(folder, METHOD, SEED) for folder in (run, whole))
    names = {path.relative_to(theirs) for path in theirs.rglob("*")}
    assert {path.relative_to(ours) for path in ours.rglob("*")} == names
    for name in names:
        if (theirs / name).is_file() and name.name not in ("trained.json", "metrics.json"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    for name in ("trained.json", "metrics.json"):
        mine, others = (lasting(read_json(folder / name)) for folder in (ours, theirs))
        assert mine == others


def lasting(content: dict) -> dict:
    """Return what is the same each time."""
    # The sources may be edited while a test runs.
    measured = ("seconds", "tokens_per_second", "peak_memory_bytes", "started", "git_commit")
    return {k: lasting(v) if isinstance(v, dict) else v for k, v in content.items() if k not in measured}
