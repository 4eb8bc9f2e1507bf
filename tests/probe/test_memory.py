"""Batches that do not fit: split with the same result, found by trying, and told in one sentence."""

import multiprocessing
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from naive import tiny_model
from pydantic import ValidationError
from test_training import BLOCKS, SETTINGS, Killed, new_weights, stop_at

from preproj.probe.files import read_jsonl
from preproj.probe.memory import is_out_of_memory
from preproj.probe.methods import attach
from preproj.probe.recipe import Training
from preproj.probe.training import train

FOUR = SETTINGS.changed(batch_size=4, tokens=16 * 4 * 6, save_steps=2)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["preproj.probe.cell"])


def run(folder: Path, settings: Training, method: str = "pre+skip", refuse=None, on_step=lambda step: None):
    attached = attach(tiny_model("llama").float(), method, 0)
    if refuse:
        attached.model.get_base_model().register_forward_pre_hook(
            lambda module, args, kwargs: refuse(len(kwargs["input_ids"])), with_kwargs=True
        )
    trained = train(attached, BLOCKS, settings, 1e-2, 0, folder, on_step)
    return attached.model, trained


def curve(folder: Path) -> np.ndarray:
    rows = read_jsonl(folder / "training.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 7))
    return np.array([(row["loss"], row["grad_norm"], row["learning_rate"], row["tokens"]) for row in rows])


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unsplit")
    model, trained = run(folder, FOUR)
    assert trained.per_device_batch_size == 4
    return curve(folder), new_weights(model), trained.token_order_sha256


@pytest.mark.parametrize("part", [1, 2])
def test_a_batch_in_parts_trains_as_the_whole_one(unsplit, tmp_path, part):
    seen = []
    _, trained = run(tmp_path, FOUR.changed(per_device_batch_size=part), refuse=seen.append)
    assert seen == [part] * (6 * 4 // part)
    assert trained.per_device_batch_size == part
    assert curve(tmp_path) == pytest.approx(unsplit[0], abs=1e-5)
    assert trained.token_order_sha256 == unsplit[2]


@pytest.mark.parametrize("method", ["pre+skip", "lora", "full"])
def test_gradient_checkpointing_changes_nothing(tmp_path, method):
    plain, _ = run(tmp_path / "plain", FOUR, method)
    saving, _ = run(tmp_path / "saving", FOUR.changed(gradient_checkpointing=True), method)
    assert curve(tmp_path / "saving") == pytest.approx(curve(tmp_path / "plain"), abs=1e-6)
    assert saving.is_gradient_checkpointing
    assert not plain.is_gradient_checkpointing


def out_of_memory_from(size: int, at: int):
    """Refuse batches of a size or more from a forward pass on, counted from 1."""
    passes = []

    def refuse(batch: int) -> None:
        passes.append(batch)
        if batch >= size and passes.count(batch) >= at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return refuse, passes


@pytest.mark.parametrize("at", [1, 2, 5], ids=["first step", "optimiser's state", "after checkpoints"])
def test_auto_takes_the_largest_part_that_fits_and_ends_as_the_whole_batch_does(unsplit, tmp_path, at):
    refuse, passes = out_of_memory_from(3, at)
    _, trained = run(tmp_path, FOUR.changed(per_device_batch_size="auto"), refuse=refuse)
    assert trained.per_device_batch_size == 2
    whole = passes.count(4)
    assert whole == at
    kept = (at - 1) // 2 * 2  # steps in a whole checkpoint are not trained again
    assert passes[whole:] == [2] * (2 * (6 - kept))
    assert curve(tmp_path) == pytest.approx(unsplit[0], abs=1e-5)


def test_auto_that_fits_at_once_is_the_whole_batch_bit_for_bit(unsplit, tmp_path):
    model, trained = run(tmp_path, FOUR.changed(per_device_batch_size="auto"))
    assert trained.per_device_batch_size == 4
    assert torch.equal(new_weights(model), unsplit[1])


def test_an_interrupted_run_keeps_the_part_that_it_found(tmp_path):
    settings = FOUR.changed(per_device_batch_size="auto")
    refuse, _ = out_of_memory_from(3, 1)
    whole, _ = run(tmp_path / "whole", settings, refuse=refuse)
    refuse, _ = out_of_memory_from(3, 1)
    with pytest.raises(Killed):
        run(tmp_path / "cut", settings, refuse=refuse, on_step=stop_at(3))
    resumed, trained = run(tmp_path / "cut", settings)  # now the whole batch would fit
    assert trained.per_device_batch_size == 2
    assert torch.equal(new_weights(resumed), new_weights(whole))


def test_where_not_even_one_block_fits_the_error_is_that_of_memory(tmp_path):
    refuse, passes = out_of_memory_from(1, 1)
    with pytest.raises(torch.OutOfMemoryError) as error:
        run(tmp_path, FOUR.changed(per_device_batch_size="auto"), refuse=refuse)
    assert passes == [4, 2, 1]
    assert is_out_of_memory(error.value)


def test_other_errors_are_not_taken_for_it(tmp_path):
    def refuse(batch: int) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run(tmp_path, FOUR.changed(per_device_batch_size="auto"), refuse=refuse)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"batch_size": "auto"},
            "auto would leave open what is trained; give a number, and per_device_batch_size: auto",
        ),
        ({"per_device_batch_size": 3}, "per_device_batch_size is 3: expected a divisor of batch_size = 4"),
        ({"per_device_batch_size": 0}, "Input should be greater than 0"),
        ({"per_device_batch_size": "most"}, "Input should be 'auto'"),
    ],
)
def test_what_a_recipe_may_say(values, sentence):
    with pytest.raises(ValidationError) as error:
        FOUR.changed(**values)
    assert sentence in str(error.value)


def wide(settings: Training, folder: str, megabytes: int | None, answer) -> None:
    """Train a model whose logits take some megabytes a block, with little memory more than the process has."""
    torch.set_num_threads(1)
    attached = attach(tiny_model("llama", vocab_size=20_000).float(), "pre", 0)
    if megabytes is not None:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * 2**20,) * 2)
    blocks = np.random.default_rng(0).integers(0, 64, size=(16, 128))
    try:
        trained = train(attached, blocks, settings, 1e-2, 0, Path(folder), lambda step: None)
        answer.put(trained.per_device_batch_size)
    except (MemoryError, RuntimeError) as error:
        answer.put((is_out_of_memory(error), f"{type(error).__name__}: {error}"))


def in_child(settings: Training, folder: Path, megabytes: int | None):
    answer = CONTEXT.SimpleQueue()
    child = CONTEXT.Process(target=wide, args=(settings, str(folder), megabytes, answer))
    child.start()
    child.join()
    assert child.exitcode == 0
    return answer.get()


def test_a_machine_with_too_little_memory_is_recognised_and_auto_finds_what_fits(tmp_path):
    settings = Training(tokens=128 * 8 * 3, block_size=128, batch_size=8, learning_rate={"pre": 1e-2})
    assert in_child(settings, tmp_path / "enough", None) == 8
    recognised, message = in_child(settings, tmp_path / "short", 200)
    assert recognised, message
    found = in_child(settings.changed(per_device_batch_size="auto"), tmp_path / "auto", 200)
    assert found in (1, 2, 4)
