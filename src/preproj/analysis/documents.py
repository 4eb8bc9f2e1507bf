"""The part of held-out text that is measured: the first window of each document."""

from collections.abc import Iterable


def first_windows(documents: Iterable[list[int]], window: int) -> tuple[list[list[int]], int]:
    """Cut documents to the same length.

    Args:
        documents: token ids, one list a document.
        window: tokens of each.

    Returns:
        The first ``window`` tokens of each document that has as many, and how many documents are shorter and left out.

    Raises:
        ValueError: if a window has no token to predict, or fewer than two documents are left to compare.
    """
    if window < 2:
        raise ValueError(f"window is {window}: expected at least 2 tokens.")
    documents = list(documents)
    whole = [ids[:window] for ids in documents if len(ids) >= window]
    if len(whole) < 2:
        raise ValueError(
            f"{len(whole)} of {len(documents)} documents have {window} tokens: expected at least 2. "
            "Give longer documents or a smaller window."
        )
    return whole, len(documents) - len(whole)
