"""Tiny random models in place of those that PEFT's tests ask for by their names on the Hub."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from tiny import tiny_config

# Names on the Hub that do not hold the name of a class.
CLASSES = {"tiny-dummy-qwen2": "Qwen2ForCausalLM", "tiny-random-gpt_neo": "GPTNeoForCausalLM"}


def save_tiny_models(names: Iterable[str], folder: Path) -> None:
    """Saves a random model of the class in each name, where ``from_pretrained`` looks before it asks the Hub.

    Args:
        names: such as ``peft-internal-testing/tiny-random-OPTForCausalLM``.
        folder: the working directory of the tests; a model goes to the folder of its name in it.
    """
    for name in sorted(names):
        last = name.rpartition("/")[2]
        cls = getattr(transformers, CLASSES.get(last) or re.sub(r"^tiny-(random-)?|-(calibrated|[\d.]+)$", "", last))
        torch.manual_seed(0)
        config = tiny_config(cls.config_class.model_type)
        config.is_decoder = False  # BERT reads both ways here
        if config.is_encoder_decoder:
            config.decoder_start_token_id = 0
        cls(config).save_pretrained(folder / name)
