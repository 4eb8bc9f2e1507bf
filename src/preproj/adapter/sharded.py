"""A model whose weights are spread over processes hands out empty or flat pieces of them."""

from collections.abc import Mapping

from torch import Tensor, distributed


def refuse_pieces(weights: Mapping[str, Tensor]) -> None:
    """Raise unless what is to be saved holds whole matrices; DeepSpeed ZeRO-3 and FSDP keep pieces in each process.

    Only the process that writes files is asked, the first: the others may have nothing.

    Args:
        weights: of one adapter, by key.

    Raises:
        ValueError: if there are none, or one is no matrix.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0:
        return
    pieces = [f"{key} of shape {tuple(weight.shape)}" for key, weight in weights.items() if not _is_matrix(weight)]
    if pieces or not weights:
        raise ValueError(
            f"the adapter cannot be saved: it would hold {pieces[0] if pieces else 'no weight'}. DeepSpeed ZeRO-3 and "
            "FSDP spread the weights over the processes: gather them in every process and give them to the first, "
            "save_pretrained(folder, state_dict=accelerator.get_state_dict(model)); with ZeRO-3 this needs "
            "stage3_gather_16bit_weights_on_model_save."
        )


def _is_matrix(weight: Tensor) -> bool:
    return weight.dim() == 2 and weight.numel() > 0
