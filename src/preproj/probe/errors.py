"""The one exception a user of the probe should ever read."""


class RecipeError(ValueError):
    """A mistake in a recipe or in what it points to, told in one sentence that says how to put it right."""


class NewerFormatError(RecipeError):
    """A file that a newer preproj wrote."""


def first_line(error: BaseException) -> str:
    """Return what a library's error says first, without its full stop; its name where it says nothing."""
    return str(error).strip().split("\n")[0].rstrip(".:") or type(error).__name__
