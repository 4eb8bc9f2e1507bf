"""Frozen-probe training: the data it sees, what changes, and resuming."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from naive import tiny_model
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from preproj.probe.files import read_jsonl
from preproj.probe.methods import attach
from preproj.probe.recipe import Training
from preproj.probe.training import NonFiniteLossError, block_order, train

BLOCKS = np.random.default_rng(0).integers(0, 64, size=(20, 16))
SETTINGS = Training(tokens=16 * 2 * 12, block_size=16, batch_size=2, learning_rate={"pre+skip": 1e-2}, save_steps=4)
ALL_THREE = "pre+skip+lora"


def run(folder: Path, method: str = "pre+skip", rate: float = 1e-2, seed: int = 0, on_step=lambda step: None, **kwargs):
    attached = attach(tiny_model("llama").float(), method, seed)
    settings, report_to = kwargs.get("settings", SETTINGS), kwargs.get("report_to", [])
    trained = train(attached, BLOCKS, settings, rate, seed, folder, on_step, report_to, "the name")
    return attached.model, trained


def new_weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def test_block_order_is_whole_shuffled_passes():
    order = block_order(blocks=10, needed=25, seed=3)
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert len(order) == 25
    assert order[:10].tolist() != order[10:20].tolist()
    assert order.tolist() == block_order(10, 25, 3).tolist()
    assert order.tolist() != block_order(10, 25, 4).tolist()


def test_every_method_sees_the_same_tokens_in_the_same_order(tmp_path):
    hashes = {m: run(tmp_path / m, m)[1].token_order_sha256 for m in ("pre", "pre+skip", "lora", "pre+lora")}
    assert len(set(hashes.values())) == 1
    assert run(tmp_path / "other", seed=1)[1].token_order_sha256 not in hashes.values()


def test_the_model_really_gets_those_tokens(tmp_path, monkeypatch):
    seen = []
    attached = attach(tiny_model("llama").float(), "pre", 0)
    attached.model.get_base_model().model.register_forward_pre_hook(
        lambda m, a, k: seen.append(k["input_ids"].clone()), with_kwargs=True
    )
    train(attached, BLOCKS, SETTINGS, 1e-3, 0, tmp_path, lambda step: None)
    assert torch.equal(torch.cat(seen), torch.as_tensor(BLOCKS[block_order(20, 24, 0)]))


def test_blocks_in_a_file_train_alike_and_the_hash_is_of_64_bit_tokens(tmp_path):
    np.save(tmp_path / "blocks.npy", BLOCKS.astype(np.uint16))
    stored = np.load(tmp_path / "blocks.npy", mmap_mode="r")
    attached = attach(tiny_model("llama").float(), "pre", 0)
    trained = train(attached, stored, SETTINGS, 1e-3, 0, tmp_path, lambda step: None)
    expected = BLOCKS[block_order(20, 24, 0)].astype("<i8").tobytes()
    assert trained.token_order_sha256 == hashlib.sha256(expected).hexdigest()


def test_first_loss_is_the_mean_cross_entropy_of_the_untrained_model(tmp_path):
    run(tmp_path, "pre")
    ids = torch.as_tensor(BLOCKS[block_order(20, 24, 0)[:2]])
    logits = tiny_model("llama").float()(ids).logits[:, :-1]  # the pre-projection starts as the identity
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 64), ids[:, 1:].reshape(-1)).item()
    assert read_jsonl(tmp_path / "training.jsonl")[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_training_lowers_the_loss_and_leaves_the_base_alone(tmp_path):
    before = tiny_model("llama").float().state_dict()
    settings = SETTINGS.model_copy(update={"tokens": 16 * 2 * 100})
    model, _ = run(tmp_path, settings=settings)
    losses = [row["loss"] for row in read_jsonl(tmp_path / "training.jsonl")]
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.3
    after = model.get_base_model().state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize(
    ("method", "rate", "ours"),
    [
        ("dense-qkv", 3e-3, ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
        ("full", 3e-3, ("",)),
        ("dora", 1e-2, (".lora_A.default.weight", ".lora_B.default.weight", ".lora_magnitude_vector.default.weight")),
        ("rslora", 1e-2, (".lora_A.default.weight", ".lora_B.default.weight")),
        ("skip-r4", 1e-2, (".skip_a.default.weight", ".skip_b.default.weight")),
        ("pre+skip-r4", 1e-2, tuple(f".{what}.default.weight" for what in ("up", "down", "skip_a", "skip_b"))),
    ],
)
def test_every_method_lowers_the_loss_and_changes_its_own_weights_only(tmp_path, method, rate, ours):
    before = {n: p.clone() for n, p in attach(tiny_model("llama").float(), method, 0).model.named_parameters()}
    model, _ = run(tmp_path, method, rate, settings=SETTINGS.model_copy(update={"tokens": 16 * 2 * 100}))
    losses = [row["loss"] for row in read_jsonl(tmp_path / "training.jsonl")]
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.3
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if n.endswith(ours)}


def test_log_has_one_row_a_step_with_warm_up_and_cosine(tmp_path):
    steps = []
    run(tmp_path, on_step=steps.append)
    rows = read_jsonl(tmp_path / "training.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["tokens"] for row in rows] == [32 * i for i in range(1, 13)]
    assert steps == list(range(13))
    rates = [row["learning_rate"] for row in rows]
    assert max(rates) == pytest.approx(1e-2)
    # 12 steps, 1 of warm-up: the cosine over the 11 others, logged as the rate used in the step.
    expected = [0.0] + [1e-2 * 0.5 * (1 + np.cos(np.pi * i / 11)) for i in range(11)]
    assert rates == pytest.approx(expected)


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


def stop_at(step: int):
    def on_step(done: int) -> None:
        if done == step:
            raise Killed

    return on_step


@pytest.mark.parametrize(
    ("step", "method"),
    [*((step, "pre+skip") for step in (1, 4, 6, 11)), (6, "lora"), (6, "pre+lora"), (6, ALL_THREE)]
    + [(step, method) for method in ("full", "dense-qkv") for step in (1, 6)]
    + [(6, "dora")],
)
def test_a_resumed_run_ends_bit_for_bit_like_an_uninterrupted_one(tmp_path, step, method):
    whole, _ = run(tmp_path / "whole", method)
    with pytest.raises(Killed):
        run(tmp_path / "cut", method, on_step=stop_at(step))
    resumed, trained = run(tmp_path / "cut", method)
    assert len(new_weights(resumed)) == attach(tiny_model("llama"), method, 0).trainable_parameters
    assert torch.equal(new_weights(resumed), new_weights(whole))
    logs = [read_jsonl(tmp_path / name / "training.jsonl") for name in ("whole", "cut")]
    assert logs[0] == logs[1]
    assert trained.seconds > 0


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard")).Reload()


@pytest.mark.parametrize("interruptions", [[], [3], [6, 11]])
def test_tensorboard_has_each_step_once_as_in_the_log(tmp_path, interruptions):
    for step in interruptions:
        with pytest.raises(Killed):
            run(tmp_path, on_step=stop_at(step), report_to=["tensorboard"])
    run(tmp_path, report_to=["tensorboard"])
    rows = read_jsonl(tmp_path / "training.jsonl")
    for key in ("loss", "learning_rate", "grad_norm"):
        scalars = events(tmp_path).Scalars(f"train/{key}")
        assert [scalar.step for scalar in scalars] == list(range(1, 13))
        assert [scalar.value for scalar in scalars] == pytest.approx([row[key] for row in rows], rel=1e-6)  # float32


def test_trackers_get_the_name_of_the_run_and_change_nothing(tmp_path):
    tracked, _ = run(tmp_path / "tracked", report_to=["tensorboard"])
    plain, _ = run(tmp_path / "plain")
    assert torch.equal(new_weights(tracked), new_weights(plain))
    assert not (tmp_path / "plain/tensorboard").exists()
    text = events(tmp_path / "tracked").Tensors("args/text_summary")[0].tensor_proto.string_val[0]
    assert json.loads(text)["run_name"] == "the name"


def test_seconds_are_summed_over_resumes(tmp_path):
    with pytest.raises(Killed):
        run(tmp_path, on_step=stop_at(6))
    state = json.loads((tmp_path / "checkpoints/checkpoint-4/trainer_state.json").read_text())
    before = state["stateful_callbacks"]["_Log"]["attributes"]["seconds"]
    assert before > 0
    assert run(tmp_path)[1].seconds > before


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_checkpoint_cut_short_is_passed_over_for_the_one_before(tmp_path, damage):
    whole, _ = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "cut", on_step=stop_at(9))
    newest = tmp_path / "cut/checkpoints/checkpoint-8"
    state = newest / "trainer_state.json"
    if damage == "gone":
        state.unlink()
    else:
        state.write_text(state.read_text()[:100])
    (newest / "adapter_model.safetensors").write_bytes(b"half")
    resumed, _ = run(tmp_path / "cut")
    assert torch.equal(new_weights(resumed), new_weights(whole))


def test_a_cell_killed_after_its_last_step_ends_the_same(tmp_path):
    whole, _ = run(tmp_path)
    again, trained = run(tmp_path)  # from checkpoint-12 of 12
    assert torch.equal(new_weights(again), new_weights(whole))
    assert [row["step"] for row in read_jsonl(tmp_path / "training.jsonl")] == list(range(1, 13))
    assert trained.seconds > 0


def test_old_checkpoints_are_removed(tmp_path):
    run(tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint-12", "checkpoint-8"]
    assert load_file(tmp_path / "checkpoints/checkpoint-12/adapter_model.safetensors")
    shutil.rmtree(tmp_path / "checkpoints")


def test_a_loss_that_is_not_finite_stops_with_its_step(tmp_path):
    with pytest.raises(NonFiniteLossError, match="not finite at step") as error:
        run(tmp_path, rate=1e30)
    assert error.value.step == len(read_jsonl(tmp_path / "training.jsonl")) + 1
