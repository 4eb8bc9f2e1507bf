"""Full disks and read-only folders: one sentence, and what was there stays as it was."""

import os
import re
import resource
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from one_cell import CONTEXT, METHOD, SEED, check_equal, one_cell
from safetensors.torch import save_file

from preproj.probe.cell import cell_folder
from preproj.probe.checkpoints import newest_whole
from preproj.probe.ending import why
from preproj.probe.files import flush, read_jsonl, whole_folder, write_text
from preproj.whole import whole_file

FULL = "No space left on device|File too large|it cannot be written"


class Limit:
    """No file of this process may grow beyond some bytes, as if the disk were full there."""

    def __init__(self, size: int):
        self.size = size

    def __enter__(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def test_a_file_that_does_not_fit_leaves_the_one_before(tmp_path):
    path = tmp_path / "summary.json"
    write_text(path, "before")
    with Limit(1000), pytest.raises(OSError, match=FULL) as refused:
        write_text(path, "x" * 2000)
    assert refused.value.filename == str(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_cut_off_by_any_error_leaves_the_one_before(tmp_path):
    path = tmp_path / "figure.svg"
    path.write_text("before")

    def half() -> None:
        with whole_file(path) as temporary:
            temporary.write_text("ha")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


WRITERS = {
    "safetensors": lambda folder: save_file({"weight": torch.zeros(1000)}, folder / "weights.safetensors"),
    "torch": lambda folder: torch.save(torch.zeros(1000), folder / "optimizer.pt"),
    "text": lambda folder: write_text(folder / "a.txt", "x" * 4000),
    "bytes": lambda folder: (folder / "a").open("wb", buffering=0).write(b"x" * 4000) == 4000 or flush_more(folder),
}


def flush_more(folder: Path) -> None:
    with (folder / "a").open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_a_folder_that_does_not_fit_leaves_the_one_before(tmp_path, write):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "before").write_text("before")

    def save() -> None:
        with whole_folder(folder) as temporary:
            write(temporary)

    with Limit(1000), pytest.raises(OSError, match=FULL) as refused:
        save()
    assert str(tmp_path) in refused.value.filename
    assert refused.value.strerror
    assert [path.name for path in tmp_path.rglob("*")] == ["adapter", "before"]
    save()
    assert "before" not in [path.name for path in folder.iterdir()]


def test_copies_that_do_not_fit_are_one_sentence(tmp_path):
    (tmp_path / "source").mkdir()
    for name in ("a", "b"):
        (tmp_path / "source" / name).write_bytes(b"x" * 4000)

    def copy() -> None:
        with whole_folder(tmp_path / "data") as folder:
            shutil.copytree(tmp_path / "source", folder, dirs_exist_ok=True)

    with Limit(1000), pytest.raises(OSError, match=FULL) as refused:
        copy()
    assert refused.value.strerror == "File too large"
    assert refused.value.filename.startswith(str(tmp_path / ".data."))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_is_flushed_is_every_file(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for name in ("a", "in/b"):
        (tmp_path / name).write_text(name)
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    flush(tmp_path)
    assert sorted(flushed) == [str(tmp_path / "a"), str(tmp_path / "in/b")]


def limited_cell(run: str, size: int, errors: Connection, only_the_adapter: bool) -> None:
    from preproj.probe.attached import Attached
    from preproj.probe.ending import one_sentence

    os.dup2(errors.fileno(), 2)  # a pipe has no limit
    save = Attached.save

    def limited(self: Attached, folder: Path, *gathered: object) -> None:
        if folder.name.startswith(".adapter."):
            Limit(size).__enter__()
        save(self, folder, *gathered)

    if only_the_adapter:
        Attached.save = limited
    else:
        Limit(size).__enter__()
    with one_sentence(Path(run)):
        one_cell(run)


# What does not fit: the log, the adapter in a checkpoint, the optimiser beside it, the adapter at the end.
SIZES = {"log": (10, False), "adapter": (20_000, False), "optimiser": (40_000, False), "at the end": (20_000, True)}


@pytest.mark.parametrize("what", SIZES)
def test_a_cell_whose_files_do_not_fit_says_so_and_goes_on_when_they_do(one_cell_run, tmp_path, what):
    begun, whole, _ = one_cell_run
    run = tmp_path / "run"
    reading, writing = CONTEXT.Pipe(duplex=False)
    shutil.copytree(begun, run)
    (size, only_the_adapter), cell = SIZES[what], cell_folder(run, METHOD, SEED)
    child = CONTEXT.Process(target=limited_cell, args=(str(run), size, writing, only_the_adapter))
    child.start()
    child.join()
    assert child.exitcode == 1
    written = os.read(reading.fileno(), 2**20).decode()
    said = written.strip().splitlines()[-1]
    place = {"log": "training.jsonl", "at the end": r"adapter\.\w+\.tmp"}.get(what, "checkpoints/checkpoint-2")
    assert re.fullmatch(rf"{re.escape(str(cell))}/\.?{place}\S*: .*({FULL}).*", said), said
    assert "Traceback" not in written
    assert not list(cell.rglob("*.tmp"))
    if what == "at the end":
        assert newest_whole(cell / "checkpoints") == cell / "checkpoints/checkpoint-20"
    elif what != "log":
        assert list((cell / "checkpoints").iterdir()) == []
        assert len(read_jsonl(cell / "training.jsonl")) == 2
    again = CONTEXT.Process(target=one_cell, args=(str(run),))
    again.start()
    again.join()
    check_equal(run, whole)


def test_a_full_disk_is_told_where_not_even_the_log_could_be_written(tmp_path, monkeypatch):
    assert why(1, tmp_path, "RuntimeError: the last line.") == "RuntimeError: the last line"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    assert why(1, tmp_path, "no message") == f"{tmp_path}: no space left on the disk"
