"""When memory runs out: what counts as that, and the sentence that says what to change."""

from accelerate.utils.memory import should_reduce_batch_size


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the device or of the machine was too small."""
    return isinstance(error, MemoryError) or (isinstance(error, Exception) and should_reduce_batch_size(error))
