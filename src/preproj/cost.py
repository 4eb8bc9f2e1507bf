"""What an adapter costs, read off the shapes of a model: parameters, computation, memory, and LoRA of the same size.

Everything is counted on the meta device, where a model has shapes and no weights.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import transformers
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from preproj.adapter import PreProjConfig
from preproj.adapter.layer import adapted_sites

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

FLOAT32_BYTES = 4
ADAMW_COPIES = 4  # the weight, its gradient and two moments

# What attention's input projections are called; a name that is none of these is no input projection.
INPUT_PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "query", "key", "value"),
    *("q", "k", "v", "q_lin", "k_lin", "v_lin", "q_a_proj", "kv_a_proj_with_mqa"),
    *("query_proj", "key_proj", "value_proj"),
)


@dataclass(frozen=True)
class Flops:
    """FLOPs per token: ``base`` is the frozen model's part, ``new`` that of the adapter's weights."""

    base: float
    new: float


@dataclass(frozen=True)
class MatchingLora:
    """The LoRA whose parameters come closest to the adapter's."""

    rank: int
    parameters: int


@dataclass(frozen=True)
class Params:
    """What an adapter adds to a model; printing it shows a table with what is counted.

    Attributes:
        model: class of the base model.
        base: parameters of the base.
        parts: new parameters of each part.
        tokens: length of the sequence that the FLOPs are an average over.
        prefill: FLOPs of a forward pass, or None where the model cannot run without weights.
        training: FLOPs of a training step: forward of all, input gradients as far down as training needs them, and
            gradients of the new weights. None as for ``prefill``.
        lora: matching LoRA on ``"attention's input projections"`` and on ``"all linear layers"``, each where PEFT has
            LoRA for these layers.
    """

    model: str
    base: int
    parts: dict[str, int]
    tokens: int
    prefill: Flops | None
    training: Flops | None
    lora: dict[str, MatchingLora]

    @property
    def new(self) -> int:
        """New parameters of all parts."""
        return sum(self.parts.values())

    @property
    def share_of_total(self) -> float:
        """New parameters over those of base and adapter."""
        return self.new / (self.base + self.new)

    @property
    def decoding_bytes(self) -> int:
        """Bytes that decoding reads for each token besides the base's: the new weights in float32."""
        return self.new * FLOAT32_BYTES

    @property
    def adamw_bytes(self) -> int:
        """Bytes AdamW trains with: new weights, their gradients and two moments, all in float32."""
        return self.new * FLOAT32_BYTES * ADAMW_COPIES

    def __str__(self) -> str:
        """Return the table."""
        rows = [
            (f"base, {self.model}", f"{self.base:,}", "parameters, frozen"),
            ("new parameters", f"{self.new:,}", f"{self.share_of_total:.2%} of the new total"),
            *((f"  {part}", f"{count:,}", "") for part, count in self.parts.items()),
            _flops("FLOPs per token, prefill", self.prefill),
            _flops("FLOPs per token, training step", self.training),
            ("reads per decoded token", f"+{self.decoding_bytes / 2**20:,.1f} MiB", "the new weights, float32"),
            ("K/V cache", "+0 bytes", "keys and values keep their shapes"),
            ("AdamW's memory", f"{self.adamw_bytes / 2**20:,.1f} MiB", "new weights, gradients, two moments, float32"),
            *(
                (f"LoRA on {where}", f"r = {lora.rank}", f"{lora.parameters:,} parameters, the closest to the new ones")
                for where, lora in self.lora.items()
            ),
        ]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{what:<{widths[0]}}  {number:>{widths[1]}}  {note}".rstrip() for what, number, note in rows]
        return "\n".join([*lines, "", *self._counted()])

    def _counted(self) -> list[str]:
        if self.prefill is None:
            return ["FLOPs are not counted: this model does not run on token ids without its weights."]
        return [
            f"FLOPs are those of matrix products (2 per multiply-add), a mean over one sequence of {self.tokens:,} "
            "tokens, attention over all pairs.",
            "A training step is the forward pass, input gradients down to the first adapted layer, and the gradients "
            "of the new weights; % is of the base's own part.",
        ]


def _flops(what: str, flops: Flops | None) -> tuple[str, str, str]:
    if flops is None:
        return what, "–", "not counted"
    return what, f"+{flops.new / 1e6:,.1f} M", f"+{flops.new / flops.base:.1%} of the base's {flops.base / 1e6:,.1f} M"


def params(
    model: PreTrainedModel | PeftModel | PreTrainedConfig, config: PreProjConfig | None = None, tokens: int = 1024
) -> Params:
    """Count what an adapter adds to a model, without loading weights; ``print`` the result.

    Args:
        model: a model of transformers (it is left alone), or a model's configuration. The class is then the one that
            ``architectures`` names, else the causal language model, else the plain model of its type.
        config: the adapter; None means ``PreProjConfig()``.
        tokens: length of the sequence that FLOPs are a mean over; cut to what the model's positions allow.

    Raises:
        ValueError: if preproj cannot adapt this model, ``tokens`` is not positive, or no model of transformers has
            this configuration.
    """
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}: expected a number above 0.")
    shell = meta_model(model)
    limit = getattr(shell.config.get_text_config(), "max_position_embeddings", None)
    tokens = min(tokens, limit) if isinstance(limit, int) and limit > 0 else tokens
    base = sum(p.numel() for p in shell.parameters())
    with adapted(shell, config or PreProjConfig()) as ours:
        parts = _parts(ours)
        prefill, training = _count_flops(ours, tokens)
    budget = sum(parts.values())
    lora = {}
    with suppress(ValueError):  # preproj knows no names, or PEFT refuses LoRA there
        lora["attention's input projections"] = matching_lora(shell, input_projections(shell), budget)
    with suppress(ValueError):  # last, because where PEFT refuses these it leaves the model half changed
        lora["all linear layers"] = matching_lora(shell, "all-linear", budget)
    return Params(type(shell).__name__, base, parts, tokens, prefill, training, lora)


def flops_per_token(model: PreTrainedModel | PeftModel, tokens: int) -> float | None:
    """Count the FLOPs of a training step of whatever trains in a model, forward and backward, over its tokens.

    Args:
        model: of :func:`meta_model`, with or without an adapter of any kind.
        tokens: length of the sequence.

    Returns:
        A mean over the sequence; None where the model does not run on token ids without its weights.
    """
    from torch.utils.flop_counter import FlopCounterMode

    try:
        with FlopCounterMode(display=False) as counter:
            model(**_inputs(model, tokens))[0].sum().backward()
    except Exception:  # whatever the model's own code needs besides the shapes of ids
        return None
    return counter.get_total_flops() / tokens


def meta_model(source: PreTrainedModel | PeftModel | PreTrainedConfig) -> PreTrainedModel:
    """Build a model of the same shape on the meta device.

    Raises:
        ValueError: if ``source`` is a configuration and no model of transformers has it.
    """
    if isinstance(source, PeftModel):
        source = source.get_base_model()
    config = copy.deepcopy(source.config if isinstance(source, PreTrainedModel) else source)
    # With these the FLOPs are those of the equations, and only of the experts a token is sent to.
    options = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    with torch.device("meta"):
        if isinstance(source, PreTrainedModel):
            return source._from_config(config, **options)  # a class method
        named = getattr(transformers, (config.architectures or [""])[0], None)
        if isinstance(named, type) and issubclass(named, PreTrainedModel):
            return named._from_config(config, **options)  # type: ignore[attr-defined]  # transformers has no types
        auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModel
        return auto.from_config(config, **options)


@contextmanager
def adapted(model: PreTrainedModel, config: PeftConfig) -> Iterator[PeftModel]:
    """Put an adapter on a model while the context is open; the model stays frozen, the configuration as it is."""
    peft_model = get_peft_model(model, copy.deepcopy(config))
    try:
        yield peft_model
    finally:
        peft_model.unload()
        vars(model).pop("peft_config", None)  # some versions of PEFT leave it


def new_parameters(model: PreTrainedModel, config: PeftConfig) -> int:
    """Return how many parameters an adapter trains; ``model`` is as before afterwards, but frozen."""
    with adapted(model, config) as peft_model:
        return peft_model.get_nb_trainable_parameters()[0]


def matching_lora(
    model: PreTrainedModel, targets: str | list[str], budget: int, *, use_dora: bool = False
) -> MatchingLora:
    """Return the LoRA whose parameters come closest to ``budget``.

    Args:
        model: of :func:`meta_model`.
        targets: as ``LoraConfig`` takes them.
        budget: parameters.
        use_dora: whether it is DoRA, whose magnitudes, one for each output of a layer, count too.

    Raises:
        ValueError: if PEFT has no LoRA for these layers.
    """
    per_rank = new_parameters(model, LoraConfig(r=1, target_modules=targets))
    magnitudes = 0
    if use_dora:
        magnitudes = new_parameters(model, LoraConfig(r=1, target_modules=targets, use_dora=True)) - per_rank
    rank = max(1, round((budget - magnitudes) / per_rank))
    return MatchingLora(rank, rank * per_rank + magnitudes)


def input_projections(model: PreTrainedModel) -> list[str]:
    """Return the names of the layers inside attention that make queries, keys and values.

    Raises:
        ValueError: if they are called otherwise than in any model preproj knows.
    """
    found = {path.rpartition(".")[2] for path in input_projection_paths(model)}
    return [name for name in INPUT_PROJECTIONS if name in found]


def input_projection_paths(model: PreTrainedModel) -> list[str]:
    """Return the paths in the model of the layers that :func:`input_projections` names; raises as it does."""
    with adapted(model, PreProjConfig()) as ours:
        paths = [
            f"{site}.{name}"
            for site, attention, _ in adapted_sites(ours)
            for name, _ in attention.named_children()
            if name in INPUT_PROJECTIONS
        ]
    if not paths:
        raise ValueError("attention's input projections: preproj does not know their names in this model.")
    return paths


def _parts(model: PeftModel) -> dict[str, int]:
    parts = {"pre-projection": 0, "content skip": 0, "modules to save": 0}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            _, ours, what = name.rpartition(".preproj.")
            part = "modules to save" if not ours else "content skip" if what.startswith("skip") else "pre-projection"
            parts[part] += weight.numel()
    return {part: count for part, count in parts.items() if count}


def _count_flops(model: PeftModel, tokens: int) -> tuple[Flops, Flops] | tuple[None, None]:
    """Count the FLOPs of a forward pass and of a training step by running them on the meta device."""
    base = model.get_base_model()
    if base.main_input_name != "input_ids":
        return None, None
    inputs = _inputs(base, tokens)
    try:
        with torch.no_grad(), _counting(model) as (new, counter):
            model(**inputs)
        prefill = Flops((counter.get_total_flops() - sum(new)) / tokens, sum(new) / tokens)
        with _counting(model) as (new, counter):
            model(**inputs)[0].sum().backward()
        training = Flops((counter.get_total_flops() - sum(new)) / tokens, sum(new) / tokens)
    except Exception:  # whatever the model's own code needs besides the shapes of ids
        return None, None
    return prefill, training


def _inputs(model: PreTrainedModel | PeftModel, tokens: int) -> dict[str, Tensor]:
    """Return ids without values."""
    # Many models look for padding among the ids; the configuration would check the type.
    vars(model.config)["pad_token_id"] = None
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    return {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}


@contextmanager
def _counting(model: PeftModel) -> Iterator[tuple[list[int], "FlopCounterMode"]]:
    """Count all FLOPs, and list those of the new weights, while the context is open."""
    from torch.utils.flop_counter import FlopCounterMode  # slow to import, and `import preproj` needs none of it

    new: list[int] = []

    def count(linear: nn.Linear, args: tuple[Tensor]) -> None:
        # Forward, and in training the gradients of the weight and, where it needs one, of the input: the same each.
        products = 1 + (1 + args[0].requires_grad if torch.is_grad_enabled() else 0)
        new.append(2 * args[0].numel() * linear.out_features * products)

    layers = [layer for _, _, layer in adapted_sites(model)]
    handles = [m.register_forward_pre_hook(count) for x in layers for m in x.modules() if isinstance(m, nn.Linear)]
    try:
        with FlopCounterMode(display=False) as counter:
            yield new, counter
    finally:
        for handle in handles:
            handle.remove()
