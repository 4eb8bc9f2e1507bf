"""Whether a run goes on as it began: the same recipe, base, text and packages, or changes that the user accepts.

environment.json keeps what a run began with, and what was accepted since.
"""

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from preproj.probe.base import Base
from preproj.probe.environment import describe_environment
from preproj.probe.errors import NewerFormatError, RecipeError
from preproj.probe.files import read_json, sha256, write_json, write_text
from preproj.probe.recipe import Recipe, parse_recipe
from preproj.probe.sources import local_files

PACKAGES = ("preproj", "torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "numpy")
"""Packages that may change a number; the others draw and sum up."""
OF_THE_MACHINE = (
    "training.save_steps",
    "training.per_device_batch_size",
    "training.gradient_checkpointing",
    "evaluation.batch_size",
    "report_to",
)
"""Keys of the recipe that say how something is computed, not what: numbers move by rounding at most."""
_LOST = "environment.json was lost, and with it what earlier results ran with"
_BASE_FILES = ("*.safetensors", "*.bin", "*.json", "*.model")


def check_recipe(run: Path, recipe: Recipe) -> list[str]:
    """Compare a recipe with that of a run folder, if it has one.

    Returns:
        What differs in keys of the machine, in words.

    Raises:
        RecipeError: where any other key differs: its cells could not be compared.
    """
    known = run / "recipe.yaml"
    if not known.exists():
        return []
    try:
        then = parse_recipe(known.read_text("utf-8"), str(known))  # a key that is newer than the run has its default
    except NewerFormatError:
        raise
    except RecipeError as error:
        raise RecipeError(f"{known} is damaged; choose another folder with --out.") from error
    changed = _differences(then.model_dump(), recipe.model_dump())
    for key, difference in changed.items():
        if key not in OF_THE_MACHINE:
            raise RecipeError(
                f"run folder {run} holds a run of another recipe: {difference}; choose another with --out."
            )
    return list(changed.values())


def _differences(then: Any, now: Any, key: str = "") -> dict[str, str]:
    """Say of each key at which two recipes differ how they do."""
    if not (isinstance(then, dict) and isinstance(now, dict)):
        return {} if then == now else {key: f"{key} was {then!r} and is {now!r}"}
    found: dict[str, str] = {}
    for name in [*then, *(name for name in now if name not in then)]:
        found |= _differences(then.get(name), now.get(name), f"{key}.{name}" if key else name)
    return found


def describe_inputs(run: Path, recipe: Recipe, base: Base, config: PretrainedConfig) -> dict[str, Any]:
    """Return environment.json's ``inputs``: the base's files, or its commit on the Hub, and the local files of text.

    Args:
        run: the run folder; a file that has the size and time noted there is not read again.
        recipe: whose text it is.
        base: the model.
        config: its configuration.
    """
    known = _last(run).get("inputs", {})
    files = {}
    if base.path is None:
        commit = {"base": {"commit": getattr(config, "_commit_hash", None)}}
    else:
        commit = {}
        files = {f"base/{path.name}": path for pattern in _BASE_FILES for path in sorted(base.path.glob(pattern))}
    texts = [recipe.data, *([recipe.evaluation.retention] if recipe.evaluation.retention else [])]
    files |= {str(path): path for text in texts for path in local_files(text)}
    return {"inputs": commit | {name: _described(path, known.get(name, {})) for name, path in files.items()}}


def changes(run: Path, recipe: Recipe, base: Base, config: PretrainedConfig) -> tuple[list[str], dict[str, Any]]:
    """Say what is otherwise than when a run began or last went on, and what is now; nothing of a new run.

    Args:
        run: the run folder.
        recipe: the recipe now.
        base: the model.
        config: its configuration.
    """
    then = _last(run)
    if not then and not (run / "corpus.json").exists():
        return [], {}
    now = describe_environment() | {"dtype": recipe.model.dtype} | describe_inputs(run, recipe, base, config)
    if not then:
        return [_LOST], now
    before = then.get("inputs", {})  # runs that began earlier have none
    changed = [
        *check_recipe(run, recipe),
        *(
            f"{name} was {then['packages'][name]} and is {now['packages'][name]}"
            for name in PACKAGES
            if then["packages"].get(name, now["packages"][name]) != now["packages"][name]
        ),
        *(
            f"{name} was {_short(before.get(name))} and is {_short(entry)}"
            for name, entry in now["inputs"].items()
            if before and _identity(before.get(name)) != _identity(entry)
        ),
    ]
    return changed, now


def go_on(run: Path, recipe: Recipe, base: Base, config: PretrainedConfig, accept: bool) -> None:
    """Let a run that has begun go on if nothing has changed; else refuse, or accept and record it.

    Args:
        run: the run folder.
        recipe: the recipe now.
        base: the model.
        config: its configuration.
        accept: whether the user accepts what has changed.

    Raises:
        RecipeError: naming what changed, from what to what.
    """
    changed, now = changes(run, recipe, base, config)
    if not changed:
        return
    if not accept:
        raise RecipeError(
            f"run folder {run} began otherwise: {'; '.join(changed)}; change that back, choose another folder with "
            "--out, or go on all the same with --accept-changes, and the report will say so."
        )
    first = now if changed == [_LOST] else read_json(run / "environment.json")
    later = [*first.get("continued", []), {key: now[key] for key in ("started", "packages", "inputs")}]
    later[-1]["changes"] = changed
    write_json(run / "environment.json", first | {"continued": later})
    write_text(run / "recipe.yaml", recipe.to_yaml())


def _last(run: Path) -> dict[str, Any]:
    """Return what was last recorded of a run's conditions; empty for a new run."""
    path = run / "environment.json"
    if not path.exists():
        return {}
    first = read_json(path)
    return first | [{}, *first.get("continued", [])][-1]


def _described(path: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Return size, time and hash of a file."""
    state = path.stat()
    found = {"bytes": state.st_size, "modified": state.st_mtime_ns}
    if found.items() <= known.items():
        return known
    return found | {"sha256": sha256(path)}


def _identity(entry: dict[str, Any] | None) -> str | None:
    return None if entry is None else entry.get("sha256") or entry.get("commit")


def _short(entry: dict[str, Any] | None) -> str:
    identity = _identity(entry)
    return "absent" if identity is None else f"{identity[:16]}…"
