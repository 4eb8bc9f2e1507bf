"""One adapter in the place of another of the same shape, which compiled code does not notice."""

from typing import Any

from peft import PeftConfig, PeftModel, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from safetensors import SafetensorError
from torch import Tensor


def hotswap_adapter(model: PeftModel, model_name_or_path: str, adapter_name: str, **kwargs: Any) -> None:
    """Copy a saved adapter's weights into those of a loaded one, so that nothing is compiled anew.

    Does for this method what ``peft.utils.hotswap.hotswap_adapter`` does for LoRA, which it is written for.

    Args:
        model: the adapted model, or what ``torch.compile`` made of it.
        model_name_or_path: folder of the saved adapter, or its name on the Hub.
        adapter_name: the loaded adapter; it keeps its name.
        **kwargs: where on the Hub, as ``PeftConfig.from_pretrained`` takes it: ``subfolder``, ``revision``, ``token``.

    Raises:
        ValueError: where no such adapter is loaded, the saved one cannot be read, or is of another method, activation
            or shape; nothing has changed then.
    """
    model = getattr(model, "_orig_mod", model)
    if not hasattr(model, "peft_config"):
        raise ValueError(f"model is {type(model).__name__}, without an adapter to swap: expected a PeftModel.")
    if adapter_name not in model.peft_config:
        raise ValueError(
            f"no adapter {adapter_name!r} to swap: expected one of {', '.join(map(repr, model.peft_config))}."
        )
    try:
        config = PeftConfig.from_pretrained(model_name_or_path, **kwargs)
        weights = load_peft_weights(model_name_or_path, device="cpu", **kwargs)
    except (KeyError, OSError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"no adapter can be read from {model_name_or_path}: {error}") from error
    here = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
    old, new = _form(model.peft_config[adapter_name], here), _form(config, weights)
    for key in [*old, *new]:
        if old.get(key) != new.get(key):
            raise ValueError(
                f"{model_name_or_path} cannot take the place of adapter {adapter_name!r}: {key} is {new.get(key)} "
                f"there and {old.get(key)} here. Load it under a name of its own."
            )
    set_peft_model_state_dict(model, weights, adapter_name=adapter_name)
    config.inference_mode = model.peft_config[adapter_name].inference_mode
    model.peft_config[adapter_name] = config


def _form(config: PeftConfig, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Return what decides, besides the values of the weights, what an adapter computes."""
    shapes = {key: tuple(weight.shape) for key, weight in weights.items()}
    return {"peft_type": config.peft_type.value, "activation": getattr(config, "activation", None), **shapes}
