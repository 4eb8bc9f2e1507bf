"""The source of modules' methods."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from torch import nn

from preproj.adapter.sites.expressions import UNKNOWN, is_norm, static_value
from preproj.adapter.sites.flow import NotUnderstoodError

Node = TypeVar("Node", bound=ast.AST)


@dataclass
class Scope:
    """One function being read: whose method it is, its variables so far, its globals."""

    module: nn.Module
    variables: dict[str, Any]
    function: Callable[..., Any]
    constants: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.constants.setdefault("self", self.module)

    def static(self, expression: ast.expr) -> Any:
        """Return what is known of an expression before anything runs."""
        match expression:  # the stream and the branch are tensors
            case ast.Compare(ast.Name(id=name), [ast.Is() | ast.IsNot() as operator], [ast.Constant(value=None)]):
                if self.variables.get(name) is not None:
                    return isinstance(operator, ast.IsNot)
        return static_value(expression, self.function, self.constants)

    def assign(self, target: ast.expr, value: Any, constant: Any) -> None:
        """Give a variable its value; of several targets the first takes it."""
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        for position, name in enumerate(names):
            if isinstance(name, ast.Name):
                self.variables[name.id] = value if position == 0 else None
                self.constants.pop(name.id, None)
                if len(names) == 1 and constant is not UNKNOWN:
                    self.constants[name.id] = constant


def first_argument(module: nn.Module) -> tuple[int, str]:
    """Return position and name of the first argument of a module's forward."""
    return 0, list(inspect.signature(forward(module)).parameters)[1]


def forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward function of a module's class, without decorators."""
    return inspect.unwrap(type(module).forward)


def norms_its_input(attention: nn.Module) -> bool:
    """Whether an attention module calls a norm of its own on what it is handed."""
    function = forward(attention)
    hidden = first_argument(attention)[1]
    norms = {name for name, child in attention.named_children() if is_norm(child)}
    return any(
        ast.unparse(call.func).removeprefix("self.") in norms and hidden in map(ast.unparse, arguments(call))
        for statement in body(function)
        for call in calls(statement)
    )


@cache
def body(function: Callable[..., Any]) -> list[ast.stmt]:
    """Parse a function and return its statements.

    Raises:
        NotUnderstoodError: if there is no source to read.
    """
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise NotUnderstoodError(f"the source of {function.__qualname__} cannot be read") from error
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition.body


def nodes(statements: Iterable[ast.AST], kind: type[Node]) -> list[Node]:
    """List the nodes of one kind in pieces of source."""
    return [node for statement in statements for node in ast.walk(statement) if isinstance(node, kind)]


def calls(node: ast.AST) -> list[ast.Call]:
    """List the calls in a piece of source."""
    return nodes([node], ast.Call)


def arguments(call: ast.Call) -> list[ast.expr]:
    """List the arguments of a call, positional ones first."""
    return [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg)]


def bind(function: Callable[..., Any], call: ast.Call) -> dict[str, ast.expr]:
    """Map parameter names of a method to the expressions of a call, in the order of the parameters."""
    names = [name for name in inspect.signature(function).parameters if name not in {"self", "cls"}]
    given = dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
    return {name: given[name] for name in names if name in given}


def loaded(target: ast.expr) -> ast.expr:
    """Return the target of an assignment as an expression to read."""
    return ast.parse(ast.unparse(target), mode="eval").body
