"""DDP and FSDP in two processes: the same numbers as one process that trains on the whole batch."""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from life import KINDS, adapted, base_of, draw
from peft import PeftModel, get_peft_model, load_peft_weights
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from two import in_two_processes

from preproj import PreProjConfig

STEPS, ROWS = 4, 4
BATCHES = torch.randint(3, 64, (STEPS, ROWS, 9), generator=torch.Generator().manual_seed(0))
TROUBLESHOOTING = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text("utf-8")
PARTS = {"both": {}, "pre": {"content_skip": False}, "skip": {"pre_projection": False}}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)


def train(model: nn.Module, losses_of: Callable[[nn.Module, Tensor], Iterator[Tensor]], whole=lambda t: t) -> dict:
    """Trains on every batch; returns the mean loss of each, and the gradients of the last."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3)
    losses = []
    for ids in BATCHES:
        optimizer.zero_grad()
        losses.append(torch.stack(list(losses_of(model, ids))).mean())
        optimizer.step()
    return {"losses": losses, "gradients": {name: whole(weight.grad) for name, weight in weights.items()}}


def loss_of(model: nn.Module, ids: Tensor) -> Iterator[Tensor]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    yield loss.detach()


def losses_of_rank(rank: int, model: nn.Module, ids: Tensor) -> Iterator[Tensor]:
    """One half of the batch; both processes' losses."""
    (mine,) = loss_of(model, ids[rank * ROWS // 2 :][: ROWS // 2])
    both = [torch.zeros_like(mine) for _ in range(2)]
    distributed.all_gather(both, mine)
    yield from both


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [m for name, m in model.named_modules() if name.rpartition(".")[0].endswith((".layers", ".layer"))]


def with_checkpointing(model: PeftModel, reentrant: bool) -> PeftModel:
    model.enable_input_require_grads()
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def plain_names(found: dict) -> dict:
    """Without what DDP and FSDP1 put into the names of weights."""
    found["gradients"] = {
        name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): gradient
        for name, gradient in found["gradients"].items()
    }
    return found


def ddp(rank: int, model: PeftModel, folder: Path) -> dict:
    found = train(DistributedDataParallel(model.train()), partial(losses_of_rank, rank))
    if rank == 0:
        model.save_pretrained(folder)
    return plain_names(found)


def fsdp2(rank: int, model: PeftModel, folder: Path, **options) -> dict:
    mesh = init_device_mesh("cpu", (2,))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model.train(), mesh=mesh, **options)
    found = train(model, partial(losses_of_rank, rank), lambda gradient: gradient.full_tensor())
    weights = get_model_state_dict(model, options=FULL)
    if rank == 0:
        model.save_pretrained(folder, state_dict=weights)
    with pytest.raises(RuntimeError, match="data pointer") as refused:
        model.save_pretrained(folder.with_name("sharded"))
    return found | {"refused": str(refused.value)}


def fsdp1(rank: int, model: PeftModel, folder: Path) -> dict:
    kinds = {type(block) for block in blocks_of(model)}
    wrapped = FullyShardedDataParallel(
        model.train(),
        auto_wrap_policy=ModuleWrapPolicy(kinds),
        use_orig_params=True,  # frozen and trained weights in one block
        device_id=torch.device("cpu"),
    )
    found = train(wrapped, partial(losses_of_rank, rank))
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        found["gradients"] = {
            name: weight.grad.clone() for name, weight in wrapped.named_parameters() if weight.requires_grad
        }
    weights = wrapped.state_dict()
    if rank == 0:
        model.save_pretrained(folder, state_dict=weights)
        pieces = {name.replace("_fsdp_wrapped_module.", ""): p.detach() for name, p in wrapped.named_parameters()}
        with pytest.raises(ValueError, match=r"cannot be saved: it would hold .*preproj\.up\..* of shape \(\d+,\)"):
            model.save_pretrained(folder.with_name("pieces"), state_dict=pieces)
        assert not (folder.with_name("pieces") / "adapter_model.safetensors").exists()
    return plain_names(found)


SCENARIOS = {
    **{f"{kind} ddp {part}": (ddp, partial(adapted, kind, **PARTS[part])) for kind in KINDS for part in PARTS},
    **{
        f"{kind} ddp checkpointing reentrant={reentrant}": (
            ddp,
            lambda kind=kind, reentrant=reentrant: with_checkpointing(adapted(kind), reentrant),
        )
        for kind in KINDS
        for reentrant in (True, False)
    },
    **{f"{kind} fsdp2": (fsdp2, partial(adapted, kind)) for kind in KINDS},
    **{f"{kind} fsdp2 bf16": (partial(fsdp2, mp_policy=HALF), partial(adapted, kind)) for kind in KINDS},
    **{f"{kind} fsdp1": (fsdp1, partial(adapted, kind)) for kind in KINDS},
}


def in_bfloat16(**options) -> PeftModel:
    model = get_peft_model(base_of("llama", torch.bfloat16), PreProjConfig(), **options)
    draw(model)
    return model.train()


def one_dtype(rank: int, folder: Path) -> dict:
    """FSDP1 refuses new weights in float32 beside a base in bfloat16, and trains where both are bfloat16."""
    with pytest.raises(ValueError, match="uniform dtype") as refused:
        fsdp1(rank, in_bfloat16(), folder)
    return fsdp1(rank, in_bfloat16(autocast_adapter_dtype=False), folder) | {"refused": str(refused.value)}


def run_kind(kind: str, rank: int, folder: Path) -> dict:
    found = {name: run(rank, build(), folder / name) for name, (run, build) in SCENARIOS.items() if kind in name}
    if kind == "llama":
        found |= {"fsdp2 beside bf16": fsdp2(rank, in_bfloat16(), folder / "fsdp2 beside bf16")}
        found |= {"fsdp1 bf16": one_dtype(rank, folder / "fsdp1 bf16")}
    return found


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory) -> Callable[[str], tuple[dict, Path]]:
    """Returns a function: all scenarios of a model, in one start of two processes, and where adapters were saved."""

    @cache
    def runs(kind: str) -> tuple[dict, Path]:
        folder = tmp_path_factory.mktemp(kind)
        return in_two_processes(partial(run_kind, kind), folder), folder

    return runs


@pytest.fixture
def runs(runs_of) -> tuple[dict, Path]:
    return runs_of("llama")


def first_fast(names: Iterable[str]) -> list:
    """Marks what is not of the first model as slow."""
    return [pytest.param(name, marks=[] if name.startswith("llama") else pytest.mark.slow) for name in names]


def part_of(name: str) -> dict:
    return PARTS.get(name.rpartition(" ")[2], {})


@pytest.mark.parametrize("name", first_fast(name for name in SCENARIOS if "bf16" not in name))
def test_two_processes_train_as_one_does(runs_of, name):
    found, folder = runs_of(name.split()[0])
    alone = adapted(name.split()[0], **part_of(name)).train()
    expected = train(alone, loss_of)
    torch.testing.assert_close(found[name]["losses"], expected["losses"], rtol=0, atol=1e-4)
    assert found[name]["gradients"].keys() == expected["gradients"].keys()
    for weight, gradient in expected["gradients"].items():
        torch.testing.assert_close(found[name]["gradients"][weight], gradient, rtol=0, atol=1e-4)
    alone.save_pretrained(folder / name / "alone")
    saved, weights = (load_peft_weights(folder / name / part, device="cpu") for part in ("", "alone"))
    assert saved.keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(saved[key], weight, rtol=0, atol=1e-4)


def losses_in_half(model: nn.Module, ids: Tensor) -> Iterator[Tensor]:
    """Each half of the batch through a copy in bfloat16; the gradients, averaged in float32, are the model's."""
    twin = copy.deepcopy(model)
    for weight in twin.parameters():
        weight.data = weight.data.bfloat16()
    for rows in ids.split(ROWS // 2):
        twin.zero_grad()
        yield from loss_of(twin, rows)
        for weight, in_half in zip(model.parameters(), twin.parameters(), strict=True):
            if weight.requires_grad:
                added = in_half.grad.float() / 2
                weight.grad = added if weight.grad is None else weight.grad + added


@pytest.mark.parametrize("kind", first_fast(KINDS))
def test_fsdp2_in_bf16_computes_in_bfloat16_and_keeps_float32_weights(runs_of, kind):
    found, folder = runs_of(kind)
    name = f"{kind} fsdp2 bf16"
    alone = adapted(kind).train()
    expected = train(alone, losses_in_half)
    torch.testing.assert_close(found[name]["losses"], expected["losses"], rtol=0, atol=1e-4)
    for weight, gradient in expected["gradients"].items():
        torch.testing.assert_close(found[name]["gradients"][weight], gradient, rtol=0, atol=1e-4)
    saved = load_peft_weights(folder / name, device="cpu")
    for key, weight in alone.named_parameters():
        if weight.requires_grad:
            assert saved[key.replace(".default.", ".")].dtype == torch.float32
            torch.testing.assert_close(saved[key.replace(".default.", ".")], weight.detach(), rtol=0, atol=1e-4)


def test_fsdp1_wants_one_dtype_and_autocast_adapter_dtype_gives_it(runs):
    found, folder = runs
    assert f"\nValueError: {found['fsdp1 bf16']['refused']}\n" in TROUBLESHOOTING
    losses = found["fsdp1 bf16"]["losses"]
    expected = train(in_bfloat16(autocast_adapter_dtype=False), loss_of)["losses"]
    torch.testing.assert_close(losses, expected, rtol=0, atol=0.02)  # 8 bits of precision
    saved = load_peft_weights(folder / "fsdp1 bf16", device="cpu")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}


def test_fsdp2_takes_float32_weights_beside_a_base_in_bfloat16(runs):
    found, folder = runs
    expected = train(in_bfloat16(), loss_of)["losses"]
    torch.testing.assert_close(found["fsdp2 beside bf16"]["losses"], expected, rtol=0, atol=0.02)  # 8 bits of precision
    saved = load_peft_weights(folder / "fsdp2 beside bf16", device="cpu")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}


def test_torch_cannot_save_what_fsdp2_has_sharded(runs):
    found, _ = runs
    assert f"\nRuntimeError: {found['llama fsdp2']['refused']}\n" in TROUBLESHOOTING


def test_the_runs_would_show_a_batch_that_is_not_shared(runs):
    """One half alone gives other gradients, by ten times the tolerance and more."""
    found, _ = runs
    half = train(adapted("llama").train(), lambda model, ids: loss_of(model, ids[: ROWS // 2]))
    there = found["llama ddp both"]["gradients"]
    assert all((there[name] - gradient).abs().max() > 1e-3 for name, gradient in half["gradients"].items())
