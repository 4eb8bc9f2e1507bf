"""The one exception a user of the probe should ever read."""


class RecipeError(ValueError):
    """A mistake in a recipe or in what it points to, told in one sentence that says how to put it right."""
