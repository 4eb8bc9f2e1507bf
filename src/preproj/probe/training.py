"""Frozen-probe training: the Trainer over packed blocks, in an order fixed by the seed."""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from preproj.optimizer import create_optimizer
from preproj.probe.attached import Attached
from preproj.probe.checkpoints import check_optimizer, checkpoint_folder, newest_whole, seal
from preproj.probe.distributed import at_main, from_main, is_main, world_size
from preproj.probe.ending import is_out_of_memory
from preproj.probe.files import named, whole_folder, write_jsonl
from preproj.probe.recipe import Training
from preproj.probe.trackers import TensorBoard


class NonFiniteLossError(RuntimeError):
    """Training, or what came of it, became infinite or not a number at ``step`` (counted from 1)."""

    def __init__(self, step: int, what: str = "the training loss"):
        super().__init__(f"{what} was not finite at step {step}; try a lower learning rate.")
        self.step = step


@dataclass(frozen=True)
class Trained:
    """What training took.

    Attributes:
        seconds: wall-clock, over all resumes.
        token_order_sha256: hash of the tokens in order.
        per_device_batch_size: blocks that were in memory at once, at the end.
    """

    seconds: float
    token_order_sha256: str
    per_device_batch_size: int


def block_order(blocks: int, needed: int, seed: int) -> np.ndarray:
    """Return the indices of the blocks to train on: whole shuffled passes, one after the other, cut at ``needed``."""
    passes = [np.random.default_rng([seed, i]).permutation(blocks) for i in range(math.ceil(needed / blocks))]
    return np.concatenate(passes)[:needed]


def train(
    attached: Attached,
    blocks: np.ndarray,
    settings: Training,
    learning_rate: float,
    seed: int,
    folder: Path,
    on_step: Callable[[int], None],
    report_to: Sequence[str] = (),
    run_name: str | None = None,
) -> Trained:
    """Train the weights of a method into ``folder/adapter``, with checkpoints in ``folder/checkpoints``.

    Continues from the newest whole checkpoint, if there is one. Where several processes were started each must call
    this: they share every batch, and the main process writes.

    Args:
        attached: the method on its base.
        blocks: packed training text, ``(blocks, block_size)`` of any integer type, read a block at a time.
        settings: the recipe's training section.
        learning_rate: peak of the schedule.
        seed: order of the blocks.
        folder: the cell's folder.
        on_step: called with the number of optimiser steps done.
        report_to: trackers of the recipe; TensorBoard's files go into ``folder/tensorboard``.
        run_name: what they call the run.

    Raises:
        NonFiniteLossError: if the loss is not finite.
        RecipeError: if the checkpoint is of another way to spread a model over processes.
        MemoryError, RuntimeError: if memory runs out, see :func:`preproj.probe.ending.is_out_of_memory`.
    """
    order = block_order(len(blocks), settings.steps * settings.batch_size, seed)
    data, checkpoints = _Ordered(blocks, order), folder / "checkpoints"

    def attempt(per_device: int) -> float:
        resume = from_main(lambda: newest_whole(checkpoints))
        if resume:
            attached.load(resume)  # before it may be sharded
        log = _Log(folder / "training.jsonl", settings, per_device, on_step)
        arguments = TrainingArguments(
            output_dir=str(checkpoints),
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=settings.batch_size // (per_device * world_size()),
            gradient_checkpointing=settings.gradient_checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            max_steps=settings.steps,
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=round(settings.warmup_ratio * settings.steps),
            max_grad_norm=settings.max_grad_norm,
            use_cpu=attached.model.device.type == "cpu",
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_steps=settings.save_steps,
            save_total_limit=2,
            seed=seed,
            report_to=[tracker for tracker in report_to if tracker != "tensorboard"],
            run_name=run_name,
            dataloader_pin_memory=torch.cuda.is_available(),
            ddp_find_unused_parameters=not attached.adapters,  # a base of its own may have weights it does not use
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        board = [TensorBoard(folder / "tensorboard")] if "tensorboard" in report_to and is_main() else []
        trainer = _FrozenProbeTrainer(
            attached,
            settings,
            args=arguments,
            train_dataset=data,
            data_collator=default_data_collator,
            callbacks=[log, *board],
        )
        trainer.remove_callback(PrinterCallback)
        if resume:
            check_optimizer(resume, trainer.optimizer_file)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        # The last update comes after the last loss.
        if not all(weight.isfinite().all() for weight in attached.model.parameters() if weight.requires_grad):
            raise NonFiniteLossError(settings.steps, "a trained weight")
        with whole_folder(folder / "adapter") if is_main() else nullcontext(folder) as adapter:
            trainer.save_model(str(adapter))  # every process hands over its part
        return log.seconds

    seconds, per_device = _largest_that_fits(attempt, settings, attached.model, checkpoints)
    digest = hashlib.sha256()
    for i in order:
        digest.update(blocks[i].astype(np.int64).tobytes())
    return Trained(seconds, digest.hexdigest(), per_device)


def _largest_that_fits(
    attempt: Callable[[int], float], settings: Training, model: nn.Module, checkpoints: Path
) -> tuple[float, int]:
    """Train with as many blocks in memory as the recipe says, or with ``auto`` as fit, and return how many.

    Every step has the same shapes, so what two steps fit into is enough for all; a run that goes on keeps its size.
    """
    if settings.per_device_batch_size != "auto":
        per_device = settings.per_device_batch_size or settings.batch_size // world_size()
        return attempt(per_device), per_device
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    start = [weight.detach().to("cpu", copy=True) for weight in trained]
    checkpoint = newest_whole(checkpoints)
    largest = _log_state(checkpoint)["per_device_batch_size"] if checkpoint else settings.batch_size
    for per_device in (size for size in range(largest, 0, -1) if settings.batch_size % size == 0):
        try:
            return attempt(per_device), per_device
        except (MemoryError, RuntimeError) as error:
            if per_device == 1 or not is_out_of_memory(error):
                raise
        # Only now, with the error, what the attempt holds is free.
        clear_device_cache(garbage_collection=True)
        with torch.no_grad():
            for weight, before in zip(trained, start, strict=True):
                weight.copy_(before)
                weight.grad = None
    raise AssertionError("a size of one either fits or raises")


def _log_state(checkpoint: Path) -> dict[str, Any]:
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    return state.stateful_callbacks[_Log.__name__]["attributes"]


class _Ordered(Dataset):
    """The blocks in the order of training, one read at a time from the file they are in."""

    def __init__(self, blocks: np.ndarray, order: np.ndarray):
        self.blocks = blocks
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.blocks[self.order[i]].astype(np.int64))
        labels = ids.clone()
        labels[0] = -100  # nothing predicts a block's first token; older Trainers count it in the mean otherwise
        return {"input_ids": ids, "labels": labels}


class _FrozenProbeTrainer(Trainer):
    """The Trainer, over the data in the given order, for all adapters of a method."""

    def __init__(self, attached: Attached, settings: Training, **options: Any):
        super().__init__(model=attached.model, **options)
        self.attached, self.settings = attached, settings
        if self.is_fsdp_enabled:
            plugin = self.accelerator.state.fsdp_plugin
            plugin.state_dict_config = plugin.optim_state_dict_config = None  # accelerate would keep those of its type
            plugin.set_state_dict_type("FULL_STATE_DICT")  # an adapter is one file

    @property
    def optimizer_file(self) -> str:
        """The file of a checkpoint without which the optimiser would start anew."""
        if self.is_deepspeed_enabled:
            return "latest"
        return OPTIMIZER_NAME_BIN if self.is_fsdp_enabled else OPTIMIZER_NAME

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.optimizer = create_optimizer(
            model or self.model,
            torch.optim.AdamW,
            lr=self.args.learning_rate,
            pre_lr_ratio=self.settings.pre_lr_ratio,
            weight_decay=self.settings.weight_decay,
        )
        return self.optimizer

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.args.should_save:
            self.attached.save(Path(output_dir or self.args.output_dir), state_dict)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        checkpoint = checkpoint_folder(Path(self.args.output_dir), self.state.global_step)
        with named(checkpoint) if is_main() else nullcontext():
            super()._save_checkpoint(*args, **kwargs)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                seal(checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        """Have the main process write the states of all, which the Trainer lets each write."""
        with TemporaryDirectory() as folder:
            super()._save_rng_state(folder)
            mine = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        for states in at_main(mine):
            for name, content in states.items():
                (Path(output_dir) / name).write_bytes(content)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Do nothing: the weights are loaded."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class _Log(TrainerCallback, ExportableState):
    """Writes training.jsonl, sums the seconds and stops at a loss that is not finite, in every process at once.

    Its state travels in the Trainer's checkpoints.
    """

    def __init__(
        self,
        path: Path,
        settings: Training,
        per_device: int,
        on_step: Callable[[int], None],
        seconds: float = 0.0,
    ):
        self.path, self.per_device = path, per_device
        self.tokens_per_step = settings.block_size * settings.batch_size
        self.on_step = on_step
        self.rows: list[dict[str, Any]] = []
        self.seconds = seconds
        self.last = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take up the log where the checkpoint left it: the Trainer keeps all that was logged in there."""
        if state.global_step:
            self.rows = [self._row(entry) for entry in state.log_history if "loss" in entry]
            self._write()
            self.seconds = state.stateful_callbacks[type(self).__name__]["attributes"]["seconds"]
        self.last = time.perf_counter()
        self.on_step(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep one row per optimiser step; its loss is the mean over all processes."""
        if logs is None or "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            raise NonFiniteLossError(state.global_step)
        now = time.perf_counter()
        self.seconds, self.last = self.seconds + now - self.last, now
        self.rows.append(self._row({**logs, "step": state.global_step}))
        self._write()
        self.on_step(state.global_step)

    def _write(self) -> None:
        if is_main():
            write_jsonl(self.path, self.rows)

    def _row(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": entry["step"],
            "tokens": entry["step"] * self.tokens_per_step,
            "loss": entry["loss"],
            "learning_rate": entry["learning_rate"],
            "grad_norm": float(entry["grad_norm"]),
        }

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must carry."""
        return {"args": {}, "attributes": {"seconds": self.seconds, "per_device_batch_size": self.per_device}}
