"""One cell by several processes: it ends like that of one, also when it was killed on the way."""

import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from one_cell import CONTEXT, METHOD, SEED, cell_process
from safetensors.torch import load_file
from torch.testing import assert_close

from preproj.probe import distributed
from preproj.probe.cell import cell_folder, train_cell
from preproj.probe.errors import RecipeError
from preproj.probe.files import read_json, read_jsonl
from preproj.probe.process import Progress
from preproj.probe.recipe import Recipe

CELL = f"{METHOD}/seed{SEED}"
CONFIGURATIONS = Path(__file__).parent.parent.parent / "recipes/accelerate"


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def probe(place: Mapping[str, str], printed: str, arguments: list[str]) -> None:
    """Calls the command line as a launcher would; evaluates in this process, to save the start of another."""
    import torch

    torch.set_num_threads(1)
    os.environ.update(place)
    from preproj.cli import app
    from preproj.probe.cell import run_cell

    def run_module(module: str, given: list[str], *more: object) -> int:
        with patch.dict("os.environ", distributed.alone(os.environ), clear=True):
            run_cell(Path(given[0]), given[1], int(given[2]))
        return 0

    with (
        open(printed, "w") as file,
        redirect_stdout(file),
        redirect_stderr(file),
        patch("preproj.probe.worker.run_module", run_module),
    ):
        sys.exit(app(["probe", *arguments], standalone_mode=False))


def start_two(run: Path, cell: str | None = CELL, recipe: Path | None = None) -> list[BaseProcess]:
    port, processes = free_port(), []
    for rank in "01":
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        arguments = [str(recipe or run.parent / "recipe.yaml"), "--out", str(run), *(["--cell", cell] if cell else [])]
        process = CONTEXT.Process(target=probe, args=(place, str(run.parent / f"printed{rank}"), arguments))
        process.start()
        processes.append(process)
    return processes


def end(processes: list[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join(300)
    return [process.exitcode for process in processes]


def begin(one_cell_run: tuple, folder: Path) -> Path:
    """A copy of the run whose text is prepared."""
    shutil.copy(one_cell_run[0].parent / "recipe.yaml", folder)
    return Path(shutil.copytree(one_cell_run[0], folder / "run"))


def kill_after(step: int, run: Path, processes: list[BaseProcess]) -> None:
    """Kills all at once, in the middle of the training."""
    log = cell_folder(run, METHOD, SEED) / "training.jsonl"
    until = time.monotonic() + 300
    while not (log.exists() and len(read_jsonl(log)) >= step):
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.01)
    for process in processes:
        process.kill()
    assert end(processes) == [-9] * len(processes)
    assert not (log.parent / "trained.json").exists()


@pytest.fixture(scope="module")
def by_two(one_cell_run, tmp_path_factory) -> Path:
    run = begin(one_cell_run, tmp_path_factory.mktemp("by two"))
    assert end(start_two(run)) == [0, 0], (run.parent / "printed0").read_text()
    return run


def scores(run: Path) -> dict:
    folder = cell_folder(run, METHOD, SEED) / "items"
    return {
        f"{path.stem} {row['id']}": row.get("perplexity") or row["log_probability"]
        for path in folder.iterdir()
        for row in read_jsonl(path)
    }


def assert_alike(run: Path, expected: Path, processes: int) -> None:
    """Compares a cell with that of one process; the losses of a document are sums over 64 tokens."""
    ours, theirs = (cell_folder(folder, METHOD, SEED) for folder in (run, expected))
    rows, expected_rows = (read_jsonl(folder / "training.jsonl") for folder in (ours, theirs))
    for key in ("step", "tokens", "learning_rate"):
        assert [row[key] for row in rows] == [row[key] for row in expected_rows]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected_rows], rel=0, abs=1e-4)
    weights, expected_weights = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (ours, theirs))
    assert weights.keys() == expected_weights.keys()
    for key, weight in expected_weights.items():
        assert_close(weights[key], weight, rtol=0, atol=1e-4)
    mine, other = scores(run), scores(expected)
    assert mine.keys() == other.keys()
    for name, score in other.items():
        assert mine[name] == pytest.approx(score, rel=1e-4), name
    metrics, expected_metrics = (read_json(folder / "metrics.json") for folder in (ours, theirs))
    per_device = {"processes": processes, "per_device_batch_size": 2 // processes}
    assert {key: metrics[key] for key in per_device} == per_device
    for key in ("token_order_sha256", "tokens", "steps", "trainable_parameters", "measures"):
        assert metrics[key] == expected_metrics[key]


def test_a_cell_of_two_processes_ends_like_that_of_one(one_cell_run, by_two):
    assert_alike(by_two, one_cell_run[1], processes=2)
    assert not list(by_two.rglob(".claim-*"))
    assert not (cell_folder(by_two, METHOD, SEED) / "checkpoints").exists()
    assert (by_two.parent / "printed0").read_text().startswith("pre+skip seed 0 (1/1)\n")
    assert "pre+skip" not in (by_two.parent / "printed1").read_text()


def test_killed_in_the_middle_it_goes_on_and_ends_the_same_to_the_bit(one_cell_run, by_two, tmp_path):
    run = begin(one_cell_run, tmp_path)
    kill_after(5, run, start_two(run))
    assert end(start_two(run)) == [0, 0], (tmp_path / "printed0").read_text()
    ours, theirs = (cell_folder(folder, METHOD, SEED) for folder in (run, by_two))
    for name in ("training.jsonl", "adapter/adapter_model.safetensors", "items/document.jsonl"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    assert ", left by process " not in (by_two.parent / "printed0").read_text()
    assert ", left by process " in (tmp_path / "printed0").read_text()


def test_begun_by_one_process_it_is_continued_by_two(one_cell_run, tmp_path):
    run = begin(one_cell_run, tmp_path)
    kill_after(5, run, [cell_process(run)])
    assert end(start_two(run)) == [0, 0], (tmp_path / "printed0").read_text()
    assert_alike(run, one_cell_run[1], processes=2)


def test_begun_by_two_processes_it_is_continued_by_one(one_cell_run, tmp_path):
    run = begin(one_cell_run, tmp_path)
    kill_after(5, run, start_two(run))
    alone = cell_process(run)
    assert end([alone]) == [0]
    assert_alike(run, one_cell_run[1], processes=1)


def test_a_cell_that_has_ended_lets_the_other_process_go(by_two):
    assert end(start_two(by_two)) == [0, 0]


REFUSED = {
    "no cell": (None, {}, "2 processes were started together: name the cell they train, --cell METHOD/seedN."),
    "auto": (
        CELL,
        {"per_device_batch_size": "auto"},
        "training.per_device_batch_size is auto, which one process alone ",
    ),
    "odd": (
        CELL,
        {"batch_size": 5},
        "training.batch_size is 5: 2 processes cannot share that; expected a multiple of 2.",
    ),
    "odd parts": (
        CELL,
        {"batch_size": 6, "per_device_batch_size": 2},
        "training.batch_size is 6: 2 processes, each with 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_several_processes_cannot_do_is_refused(recipe, case, monkeypatch):
    cell, training, sentence = REFUSED[case]
    checked = Recipe.model_validate(recipe | {"training": recipe["training"] | {"tokens": 960} | training})
    distributed.check(checked, cell)  # by one
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RecipeError) as error:
        distributed.check(checked, cell)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "accelerate's mixed_precision is bf16: set it to 'no'."),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
            "accelerate's fsdp_version is 1, which takes one dtype ",
        ),
        ({"ACCELERATE_USE_FSDP": "true"}, "accelerate's fsdp_version is 1, which takes one dtype "),
    ],
)
def test_what_accelerate_must_not_be_told_is_refused(recipe, environment, sentence, monkeypatch):
    for name, value in ({"WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no"} | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError) as error:
        distributed.check(Recipe.model_validate(recipe), CELL)
    assert str(error.value).startswith(sentence)


def test_a_process_that_does_not_see_the_run_says_so(tmp_path):
    with pytest.raises(RecipeError) as error:
        train_cell(tmp_path / "run", METHOD, SEED, Progress())
    assert str(error.value) == (
        f"run folder {tmp_path / 'run'} is not on {platform.node()}: all machines need it, so name a folder that they "
        "share with --out."
    )


def test_a_cells_own_process_knows_of_no_others(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(name, "1")
    kept = distributed.alone(os.environ)
    assert "PATH" in kept
    assert not any(name.startswith(("RANK", "WORLD", "MASTER", "TORCHELASTIC", "GROUP", "ACCELERATE")) for name in kept)


def launch(launcher: list[str], recipe: Path, run: Path) -> subprocess.Popen:
    command = [*launcher, "-m", "preproj", "probe", str(recipe), "--out", str(run), "--cell", CELL]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]


def accelerate(configuration: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", free_port()),
        *("--config_file", str(configuration)),
    ]


@pytest.fixture
def launched(one_cell_run, tmp_path) -> Callable[..., Path]:
    """Returns a function that runs the cell under launchers, to its end."""

    def run(*launchers: list[str]) -> Path:
        run = begin(one_cell_run, tmp_path)
        processes = [launch(launcher, tmp_path / "recipe.yaml", run) for launcher in launchers]
        printed = [process.communicate(timeout=540)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(launchers), printed
        return run

    return run


@pytest.mark.slow
def test_torchrun(launched, one_cell_run):
    assert_alike(launched(torchrun("--standalone", "--nproc-per-node", "2")), one_cell_run[1], processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["ddp.yaml", "fsdp2.yaml"])
def test_accelerate_launch(launched, one_cell_run, configuration):
    """On the CPU accelerate trains in DDP, whatever the configuration; tests/distributed has FSDP2 itself."""
    assert_alike(launched(accelerate(CONFIGURATIONS / configuration)), one_cell_run[1], processes=2)


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed(launched, one_cell_run, tmp_path, monkeypatch, stage):
    """By DeepSpeed's own operations for the CPU, which it compiles at the first use."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    configuration = yaml.safe_load((CONFIGURATIONS / "zero3.yaml").read_text())
    configuration["deepspeed_config"]["zero_stage"] = stage
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(configuration))
    assert_alike(launched(accelerate(tmp_path / "zero.yaml")), one_cell_run[1], processes=2)


@pytest.mark.slow
def test_two_launchers_of_one_process_each_stand_for_two_machines(launched, one_cell_run):
    address = f"127.0.0.1:{free_port()}"
    node = torchrun("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", address)
    assert_alike(launched(node, node), one_cell_run[1], processes=2)


@pytest.mark.slow
def test_accelerates_launchers_of_two_machines(launched, one_cell_run):
    port = free_port()
    nodes = [
        [
            *(
                sys.executable,
                "-m",
                "accelerate.commands.launch",
                "--config_file",
                str(CONFIGURATIONS / "multi-node.yaml"),
            ),
            *("--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port),
            *("--machine_rank", rank),
        ]
        for rank in "01"
    ]
    assert_alike(launched(*nodes), one_cell_run[1], processes=2)


def test_the_configurations_are_accelerates(monkeypatch):
    from accelerate.commands.config import load_config_from_file

    kinds = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED", "multi-node": "MULTI_GPU"}
    assert {path.stem for path in CONFIGURATIONS.iterdir()} == set(kinds)
    for name, kind in kinds.items():
        path = CONFIGURATIONS / f"{name}.yaml"
        read = load_config_from_file(str(path))
        assert read.distributed_type == kind
        assert read.mixed_precision == "no"
        assert set(yaml.safe_load(path.read_text())) <= set(vars(read))
        if kind == "DEEPSPEED":  # a number would have to be the recipe's, which DeepSpeed refuses otherwise
            assert read.deepspeed_config["gradient_accumulation_steps"] == "auto"
