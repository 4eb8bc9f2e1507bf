"""Where attention sits in a model, found in the source of its blocks."""

from peft import PeftModel
from torch import nn

from preproj.adapter.sites.attention import (
    candidates,
    hidden_size_of,
    in_features,
    is_sequence_first,
    out_features,
    out_size_of,
    self_attention,
)
from preproj.adapter.sites.expressions import is_norm
from preproj.adapter.sites.flow import Branch, CrossAttentionError, NotUnderstoodError
from preproj.adapter.sites.reading import Reader
from preproj.adapter.sites.site import Site, Sites
from preproj.adapter.sites.source import first_argument, norms_its_input

__all__ = [
    "NotUnderstoodError",
    "Site",
    "Sites",
    "candidates",
    "hidden_size_of",
    "name_one_of",
    "own_site",
    "site_of",
    "sites",
]


def sites(model: nn.Module) -> Sites:
    """Find every place of a model where the method acts; ``print(preproj.sites(model))`` shows a table.

    Cross-attention, mixers without attention (Mamba, linear attention) and the parts of a model for images or sound
    are left out. A module that stands at several places (ALBERT, Zamba2) is listed once and acts at each of them.

    Args:
        model: the base model, on any device, adapted or not.

    Returns:
        The sites, in the order of the model.

    Raises:
        ValueError: if the model has no attention or a block whose residual sum is not understood.
    """
    if isinstance(model, PeftModel):
        model = model.get_base_model()
    found = Sites()
    for name, attention in self_attention(model):
        try:
            found.append(site_of(model, name, attention))
        except CrossAttentionError:
            continue
        except NotUnderstoodError as error:
            raise ValueError(
                f"preproj cannot place the content skip at {name!r} ({type(attention).__name__}): {error}. "
                f"{name_one_of(model)}"
            ) from error
    if not found:
        raise ValueError(f"preproj finds no self-attention in {type(model).__name__}. {name_one_of(model)}")
    return found


def site_of(model: nn.Module, name: str, attention: nn.Module) -> Site:
    """Read the surroundings of one attention module.

    Args:
        model: the model.
        name: path of the attention module in it.
        attention: the module.

    Raises:
        NotUnderstoodError: with what stands in the way.
    """
    places = [place for place, module in model.named_modules(remove_duplicate=False) if module is attention]
    (branch, reader), *others = [_read(model, place, attention) for place in places]
    if any((other, its.entry) != (branch, reader.entry) for other, its in others):
        raise NotUnderstoodError("it stands at several places, and its branch does not end in the same module at each")
    assert reader.entry is not None  # a branch starts where attention is entered
    if reader.entry.is_stream and norms_its_input(attention):
        raise NotUnderstoodError("it norms its input itself, so that x̂ never enters it")
    names = {id(module): path for path, module in model.named_modules()}
    landing = names[id(branch.landing)]
    parent, _, child = landing.rpartition(".")
    width = hidden_size_of(attention)
    assert width is not None
    return Site(
        name=name,
        kind=_kind(reader, branch),
        width=width,
        out_width=out_features(branch.landing) or out_size_of(attention) or width,
        arguments=reader.entry.arguments,
        landing=landing,
        multiplier=branch.multiplier,
        is_residual=reader.adds_its_input,
        sequence_first=is_sequence_first(attention),
        attention=attention,
        landing_parent=None if branch.landing is attention else model.get_submodule(parent),
        landing_child=child,
    )


def _read(model: nn.Module, place: str, attention: nn.Module) -> tuple[Branch, Reader]:
    """Read the blocks around one place of an attention module, from the innermost on, until one holds the sum."""
    parents = place.split(".")[:-1]
    while True:
        block = model.get_submodule(".".join(parents))
        if not isinstance(block, nn.ModuleList | nn.ModuleDict):
            reader = Reader(attention)
            branch = reader.read(block)
            if branch is not None:
                return branch, reader
        if not parents:
            raise NotUnderstoodError("no block around it adds it to a residual stream")
        parents = parents[:-1]


def own_site(name: str, attention: nn.Module) -> Site:
    """Return the site of a module in an unknown block: x̂ is its first argument, the skip lands on its output.

    Args:
        name: path of the attention module.
        attention: the module.
    """
    width = hidden_size_of(attention)
    assert width is not None
    (position, argument) = first_argument(attention)
    return Site(
        name=name,
        kind="not verified",
        width=width,
        out_width=width,
        arguments=((position, argument),),
        landing=name,
        sequence_first=is_sequence_first(attention),
        attention=attention,
    )


def name_one_of(model: nn.Module) -> str:
    """Say how to name attention modules by hand, with the candidates."""
    found = candidates(model)
    if not found:
        return "It has no module that looks like attention."
    return f"Name the attention modules with target_modules; candidates: {'; '.join(found)}."


def _kind(reader: Reader, branch: Branch) -> str:
    traits = []
    if reader.entry is not None and reader.entry.is_stream:
        traits.append("no norm before it")
    if branch.landing is not reader.attention:
        if any(branch.landing is inner for inner in reader.attention.modules()):
            traits.append("residual inside it")
        elif is_norm(branch.landing):
            traits.append("norm after it")
        elif in_features(branch.landing) is not None:
            traits.append("projection after it")
        else:
            traits.append("gate after it")
    if branch.multiplier != 1:
        traits.append(f"multiplier {branch.multiplier:.4g}")
    if branch.parallel:
        traits.append("parallel")
    return ", ".join(traits) or "plain"
