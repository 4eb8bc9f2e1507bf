"""Trackers: services and files beside training.jsonl to which a training run's log goes, through the Trainer."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from preproj.probe.errors import RecipeError


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that is not installed; each is called like its package.

    Args:
        names: the recipe's ``report_to``.

    Raises:
        RecipeError: naming the first one that is missing.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RecipeError(f"report_to: {name} is not installed; run `pip install {name}`.")


def keep_wandb_in(folder: Path) -> None:
    """Have wandb write into a folder, where it also finds a run that was interrupted and goes on with it."""
    os.environ.setdefault("WANDB_DIR", str(folder))
    os.environ.setdefault("WANDB_RESUME", "auto")


class TensorBoard(TensorBoardCallback):
    """TensorBoard in ``folder``: what an interrupted process logged after its checkpoint is taken back."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Go on after the checkpoint's step."""
        from torch.utils.tensorboard import SummaryWriter

        self.tb_writer = SummaryWriter(self.folder, purge_step=state.global_step + 1)
        super().on_train_begin(args, state, control, **kwargs)
