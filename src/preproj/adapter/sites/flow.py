"""What a block's source does with attention's output: the values that the reader tells apart."""

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

STREAM = "stream"
NORMED_STREAM = "normed stream"
INPUT = "what attention reads, seen from inside"
NUMBER_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class NotUnderstoodError(Exception):
    """The way from attention to the residual sum holds a step that this reader does not know."""


class CrossAttentionError(NotUnderstoodError):
    """The module's queries are no part of the stream: it is cross-attention, or pools the stream."""


@dataclass(frozen=True)
class Branch:
    """Attention's output on its way to the sum.

    Args:
        landing: the last module it went through; the skip is added to that module's output.
        multiplier: product of the numbers it is multiplied by after ``landing``.
        parallel: whether another branch was added to it.
        moved: whether its tokens stand elsewhere than attention left them.
        gated_by: a gate that is no module, which a module has to follow for the skip to land on.
    """

    landing: nn.Module
    multiplier: float = 1.0
    parallel: bool = False
    moved: bool = False
    gated_by: str = ""

    def through(self, module: nn.Module) -> "Branch":
        """Return the branch after a module, on whose output the skip lands.

        Raises:
            NotUnderstoodError: if x̃ does not stand there as the branch does.
        """
        if self.moved:
            raise NotUnderstoodError(f"its tokens are moved before they go through {type(module).__name__}")
        return Branch(module, parallel=self.parallel)


@dataclass(frozen=True)
class Entry:
    """Where x̂ enters attention.

    Args:
        arguments: ``(position, name)`` of every parameter of attention's forward that takes x̂.
        is_stream: whether x̂ is the raw residual stream, because no norm comes before.
    """

    arguments: tuple[tuple[int, str], ...]
    is_stream: bool


@dataclass(frozen=True)
class Sum:
    """The residual sum, with the branch that reached it."""

    branch: Branch


class FoundSumError(Exception):
    """Ends the reading at the residual sum."""

    def __init__(self, branch: Branch):
        super().__init__()
        self.branch = branch


def added(left: Any, right: Any) -> Any:
    """Tell what the sum of two values is."""
    values = (left, right)
    sums = [v for v in values if isinstance(v, Sum)]
    branches = [v for v in values if isinstance(v, Branch)]
    if len(sums) + len(branches) > 1:
        raise NotUnderstoodError("its output is used twice")
    if sums:
        return Sum(replace(sums[0].branch, parallel=True))
    if branches and (STREAM in values or NORMED_STREAM in values):
        if branches[0].gated_by:
            raise NotUnderstoodError(f"`{branches[0].gated_by}` stands between it and the residual sum")
        return Sum(branches[0])
    if branches:
        return replace(branches[0], parallel=True)
    return STREAM if STREAM in values else None


def moved(value: Any) -> Any:
    """Tell what a value is after its tokens were moved."""
    return replace(value, moved=True) if isinstance(value, Branch) else value


def scaled(branch: Branch | Sum, number: Any, expression: ast.BinOp) -> Branch:
    """Tell what a branch is after it was multiplied or divided.

    Args:
        branch: what was scaled.
        number: by what, if it is known.
        expression: the source.
    """
    operation = NUMBER_OPERATIONS.get(type(expression.op))
    if isinstance(branch, Sum) or operation is None:
        raise NotUnderstoodError(f"`{ast.unparse(expression)}` stands between it and the residual sum")
    if not isinstance(number, int | float):
        return replace(branch, gated_by=ast.unparse(expression))
    multiplier = operation(branch.multiplier, number) if number else 0.0
    if not multiplier:
        raise NotUnderstoodError(f"`{ast.unparse(expression)}` switches its branch off")
    return replace(branch, multiplier=multiplier)


def either(one: Any, two: Any, test: ast.expr) -> Any:
    """Tell what a variable is after a condition that is only known at run time."""
    if isinstance(one, Branch) and isinstance(two, Branch):
        parallel, moves = one.parallel or two.parallel, one.moved or two.moved
        one, two = (replace(branch, parallel=parallel, moved=moves) for branch in (one, two))
    if one != two and (isinstance(one, Branch) or isinstance(two, Branch)):
        raise NotUnderstoodError(f"its output depends on `{ast.unparse(test)}`")
    return one if one == two else None
