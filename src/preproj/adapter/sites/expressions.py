"""What can be told of an expression in a block's source without running the block."""

import ast
import re
from collections.abc import Callable
from typing import Any

from torch import nn

UNKNOWN = object()
# Calls without effects, whose value is as fixed as that of their arguments.
PURE = {"isinstance", "hasattr", "getattr", "len", "sqrt", "math.sqrt", "float", "int"}


def static_value(expression: ast.expr, function: Callable[..., Any], constants: dict[str, Any]) -> Any:
    """Return the value of an expression that depends on the module alone, or ``UNKNOWN``.

    Args:
        expression: part of a function's source.
        function: the function, for its globals.
        constants: ``self`` and the local variables whose value is known.
    """
    local = {*function.__code__.co_varnames, *function.__code__.co_cellvars} - constants.keys()
    for node in ast.walk(expression):
        if isinstance(node, ast.Name) and node.id in local:
            return UNKNOWN
        if isinstance(node, ast.Attribute) and node.attr in {"training", "gradient_checkpointing"}:
            return UNKNOWN
        if isinstance(node, ast.Call) and ast.unparse(node.func) not in PURE:
            return UNKNOWN
    try:
        code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<block>", "eval")
        return eval(code, function.__globals__, dict(constants))
    except Exception:  # a value that is only there at run time
        return UNKNOWN


def is_dropout(module: nn.Module) -> bool:
    """Whether a module only drops values in training."""
    return isinstance(module, nn.Identity) or bool(re.search(r"dropout|droppath", _class_name(module), re.IGNORECASE))


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm."""
    return bool(re.search(r"norm", _class_name(module), re.IGNORECASE))


def is_gate(module: nn.Module) -> bool:
    """Whether a module scales a branch, or smooths it over neighbouring tokens."""
    return bool(re.search(r"scale|conv", _class_name(module), re.IGNORECASE))


def _class_name(module: nn.Module) -> str:
    """Return the name of a module's class, or of the module's that PEFT wrapped for ``modules_to_save``."""
    return type(getattr(module, "original_module", module)).__name__
