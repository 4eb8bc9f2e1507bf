"""The probe's training in two processes: the same blocks, losses and adapters as in one."""

import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from naive import tiny_model
from safetensors.torch import load_file
from two import in_two_processes

from preproj.probe.attached import Attached
from preproj.probe.errors import RecipeError
from preproj.probe.files import read_jsonl
from preproj.probe.methods import attach
from preproj.probe.recipe import Training
from preproj.probe.training import NonFiniteLossError, block_order, train

BLOCKS = np.random.default_rng(0).integers(0, 64, size=(20, 16))
OTHERS = ("pre+lora", "full", "dense-qkv")
RATES = dict.fromkeys(("pre+skip", *OTHERS), 3e-3)
SETTINGS = Training(tokens=16 * 4 * 8, block_size=16, batch_size=4, learning_rate=RATES, save_steps=2)


class Killed(BaseException):
    """Stands for the end of a process: nothing catches it."""


def fit(folder: Path, method: str, rate: float = 3e-3, stop: int | None = None, **changes) -> Attached:
    """Trains one method from its start, or goes on from a checkpoint; ``stop`` ends it after a step."""

    def on_step(step: int) -> None:
        if step == stop:
            raise Killed

    attached = attach(tiny_model("llama").float(), method, 0)
    train(attached, BLOCKS, SETTINGS.changed(**changes), rate, 0, folder, on_step)
    return attached


@contextmanager
def fsdp2_on_the_cpu():
    """Accelerate shards on accelerators only, and on the CPU falls back to DDP: have it believe in one."""
    environment = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    }

    def set_device(state: PartialState) -> None:
        state.device = torch.device("cpu")

    with (
        patch.dict("os.environ", environment),
        patch.object(PartialState, "_prepare_backend", lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)),
        patch.object(PartialState, "set_device", set_device),
    ):
        yield


def seen_by_rank(rank: int, folder: Path) -> torch.Tensor:
    """What one process reads, step by step; both hand it over."""
    seen = []
    attached = attach(tiny_model("llama").float(), "pre+skip", 0)
    attached.model.get_base_model().model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].clone()), with_kwargs=True
    )
    train(attached, BLOCKS, SETTINGS, 3e-3, 0, folder, lambda step: None)
    mine = torch.stack(seen)
    both = [torch.zeros_like(mine) for _ in range(2)]
    torch.distributed.all_gather(both, mine)
    return torch.cat(both, dim=1)


def killed_and_resumed(rank: int, folder: Path) -> None:
    with pytest.raises(Killed):
        fit(folder, "pre+skip", stop=5)
    fit(folder, "pre+skip")


def not_finite(rank: int, folder: Path) -> int:
    with pytest.raises(NonFiniteLossError) as error:
        fit(folder, "pre+skip", rate=1e30)
    return error.value.step


def another_kind(rank: int, folder: Path) -> str:
    """Goes on under FSDP2 from a checkpoint of DDP."""
    with pytest.raises(Killed):
        fit(folder, "pre+skip", stop=5)
    with fsdp2_on_the_cpu(), pytest.raises(RecipeError) as error:
        fit(folder, "pre+skip")
    return str(error.value)


def run_few(rank: int, folder: Path) -> dict:
    fit(folder / f"written by {rank}", "pre+skip")  # each has a folder of its own
    refused = another_kind(rank, folder / "another kind")
    fit(folder / "ddp/pre+skip", "pre+skip")
    killed_and_resumed(rank, folder / "resumed")
    seen = seen_by_rank(rank, folder / "seen")
    with fsdp2_on_the_cpu():
        sharded = [type(weight).__name__ for weight in weights_after(folder / "fsdp2/pre+skip", "pre+skip")]
    return {"seen": seen, "sharded": sharded, "refused": refused}


def run_others(rank: int, folder: Path) -> dict:
    for method in OTHERS:
        fit(folder / "ddp" / method, method)
    fit(folder / "accumulated", "pre+skip", per_device_batch_size=1)
    fit(folder / "checkpointed", "pre+skip", gradient_checkpointing=True)
    step = not_finite(rank, folder / "not finite")
    with fsdp2_on_the_cpu():
        for method in OTHERS:
            fit(folder / "fsdp2" / method, method)
        killed_and_resumed(rank, folder / "fsdp2 resumed")
        fit(folder / f"fsdp2 written by {rank}", "pre+skip")
    return {"step": step}


def weights_after(folder: Path, method: str) -> list[torch.Tensor]:
    return [weight for weight in fit(folder, method).model.parameters() if weight.requires_grad]


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[dict, Path]:
    """Some trainings in one start of two processes."""
    folder = tmp_path_factory.mktemp("both")
    return in_two_processes(run_few, folder), folder


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> tuple[dict, Path]:
    """The others, which take longer, in another start."""
    folder = tmp_path_factory.mktemp("others")
    return in_two_processes(run_others, folder), folder


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Callable[[str], Path]:
    """Trains a method in this process."""
    folder = tmp_path_factory.mktemp("one")

    def trained(method: str) -> Path:
        if not (folder / method).exists():
            fit(folder / method, method)
        return folder / method

    return trained


def saved(folder: Path) -> dict[str, torch.Tensor]:
    files = list((folder / "adapter").rglob("*.safetensors"))
    return {f"{path.parent.name} {key}": weight for path in files for key, weight in load_file(path).items()}


def assert_alike(folder: Path, expected: Path) -> None:
    rows, expected_rows = (read_jsonl(place / "training.jsonl") for place in (folder, expected))
    assert len(rows) == SETTINGS.steps
    for key in ("step", "tokens", "learning_rate"):
        assert [row[key] for row in rows] == [row[key] for row in expected_rows]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected_rows], rel=0, abs=1e-4)
    weights, expected_weights = saved(folder), saved(expected)
    assert weights.keys() == expected_weights.keys()
    for key, weight in expected_weights.items():
        torch.testing.assert_close(weights[key], weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize("how", ["ddp/pre+skip", "resumed", "fsdp2/pre+skip"])
def test_two_processes_log_and_save_what_one_does(both, one, how):
    assert_alike(both[1] / how, one("pre+skip"))


@pytest.mark.slow
@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_so_they_do_with_every_kind_of_method(others, one, how, method):
    assert_alike(others[1] / how / method, one(method))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["accumulated", "checkpointed", "fsdp2 resumed"])
def test_so_they_do_with_parts_of_a_batch_with_checkpointing_and_after_a_kill_of_fsdp2(others, one, how):
    assert_alike(others[1] / how, one("pre+skip"))


def test_fsdp2_really_shards(both):
    assert set(both[0]["sharded"]) == {"DTensor"}


def test_a_checkpoint_of_another_kind_is_refused_before_its_optimiser_is_lost(both):
    checkpoint = both[1] / "another kind/checkpoints/checkpoint-4"
    assert both[0]["refused"] == (
        f"{checkpoint} was written under one process or DDP, which FSDP cannot read: go on as the cell began, or "
        f"remove {checkpoint.parent} to train it anew."
    )


def check_writer(folder: Path, name: str) -> None:
    wrote, nothing = ([p.name for p in (folder / f"{name} {i}").rglob("*") if p.is_file()] for i in (0, 1))
    assert not nothing
    assert {"training.jsonl", "adapter_model.safetensors", "rng_state_0.pth", "rng_state_1.pth"} <= set(wrote)


def test_only_the_main_process_writes(both):
    check_writer(both[1], "written by")


@pytest.mark.slow
def test_only_the_main_process_writes_under_fsdp2(others):
    check_writer(others[1], "fsdp2 written by")


def test_a_step_reads_the_same_blocks_in_the_same_order(both):
    order = block_order(len(BLOCKS), SETTINGS.steps * SETTINGS.batch_size, 0)
    assert torch.equal(both[0]["seen"].flatten(0, 1), torch.as_tensor(BLOCKS[order]))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_both_at_its_step(others):
    rows = read_jsonl(others[1] / "not finite/training.jsonl")
    assert others[0]["step"] == len(rows) + 1


def test_one_process_goes_on_where_two_stopped(both, one, tmp_path):
    """Down to the learning rate; only the noise of dropout, which these models have not, would differ."""
    shutil.copytree(both[1] / "resumed", tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints/checkpoint-8")
    fit(tmp_path, "pre+skip")
    assert_alike(tmp_path, one("pre+skip"))
