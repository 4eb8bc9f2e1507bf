"""Asking the Hub once, and quickly: the libraries that load from it try again for half a minute."""

from typing import Literal

import huggingface_hub

from preproj.probe.errors import RecipeError, first_line

HUB_SECONDS = 10


def hub_commit(
    kind: Literal["model", "dataset"], key: str, name: str, instead: str, revision: str | None = None
) -> str | None:
    """Return the commit of a name on the Hub, or ``revision`` where the Hub is not to be asked.

    Args:
        kind: what the name is of.
        key: what the sentence of the error calls it.
        name: on the Hub.
        instead: what else may be given there, for the error.
        revision: a branch, a tag or a commit; None is the default branch.

    Raises:
        RecipeError: if the Hub does not answer, or has no such name.
    """
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return revision
    hub = huggingface_hub.HfApi()
    ask = hub.model_info if kind == "model" else hub.dataset_info
    try:
        return ask(name, revision=revision, timeout=HUB_SECONDS).sha
    except Exception as error:  # the Hub's client lets through whatever its HTTP library raises
        raise RecipeError(
            f"{key}: {name} cannot be had from the Hub: {first_line(error)}; give a name there or {instead}, or set "
            "HF_HUB_OFFLINE=1 to use a copy loaded before."
        ) from error
