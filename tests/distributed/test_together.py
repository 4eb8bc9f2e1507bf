"""The probe's training in two processes: the same blocks, losses and adapters as in one."""

import shutil
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
from preproj.probe.files import read_jsonl
from preproj.probe.methods import attach
from preproj.probe.recipe import Training
from preproj.probe.training import NonFiniteLossError, block_order, train

BLOCKS = np.random.default_rng(0).integers(0, 64, size=(20, 16))
RATES = dict.fromkeys(("pre+skip", "pre+lora", "full", "dense-qkv"), 3e-3)
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


def run_all(rank: int, folder: Path) -> dict:
    for method in RATES:
        fit(folder / "ddp" / method, method)
    fit(folder / "accumulated", "pre+skip", per_device_batch_size=1)
    fit(folder / "checkpointed", "pre+skip", gradient_checkpointing=True)
    killed_and_resumed(rank, folder / "resumed")
    seen = seen_by_rank(rank, folder / "seen")
    step = not_finite(rank, folder / "not finite")
    with fsdp2_on_the_cpu():
        sharded = [
            type(weight).__name__ for method in RATES for weight in weights_after(folder / "fsdp2" / method, method)
        ]
        killed_and_resumed(rank, folder / "fsdp2 resumed")
    return {"seen": seen, "step": step, "sharded": sharded}


def weights_after(folder: Path, method: str) -> list[torch.Tensor]:
    return [weight for weight in fit(folder, method).model.parameters() if weight.requires_grad]


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[dict, Path]:
    """Every training in one start of two processes."""
    folder = tmp_path_factory.mktemp("both")
    return in_two_processes(run_all, folder), folder


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """The same in this process."""
    folder = tmp_path_factory.mktemp("one")
    for method in RATES:
        fit(folder / method, method)
    return folder


def saved(folder: Path) -> dict[str, torch.Tensor]:
    files = [path for path in (folder / "adapter").rglob("*.safetensors")]
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


@pytest.mark.parametrize("method", RATES)
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_processes_log_and_save_what_one_does(both, one, how, method):
    assert_alike(both[1] / how / method, one / method)


@pytest.mark.parametrize("how", ["accumulated", "checkpointed", "resumed", "fsdp2 resumed"])
def test_so_they_do_with_parts_of_a_batch_with_checkpointing_and_after_a_kill(both, one, how):
    assert_alike(both[1] / how, one / "pre+skip")


def test_fsdp2_really_shards(both):
    assert set(both[0]["sharded"]) == {"DTensor"}


def test_a_step_reads_the_same_blocks_in_the_same_order(both):
    order = block_order(len(BLOCKS), SETTINGS.steps * SETTINGS.batch_size, 0)
    assert torch.equal(both[0]["seen"].flatten(0, 1), torch.as_tensor(BLOCKS[order]))


def test_a_loss_that_is_not_finite_stops_both_at_its_step(both):
    rows = read_jsonl(both[1] / "not finite/training.jsonl")
    assert both[0]["step"] == len(rows) + 1


def test_one_process_goes_on_where_two_stopped(both, one, tmp_path):
    """Down to the learning rate; only the noise of dropout, which these models have not, would differ."""
    shutil.copytree(both[1] / "resumed", tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints/checkpoint-8")
    fit(tmp_path, "pre+skip")
    assert_alike(tmp_path, one / "pre+skip")
