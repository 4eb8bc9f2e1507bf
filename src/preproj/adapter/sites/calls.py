"""Calls in a block's source."""

import ast
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from preproj.adapter.sites.attention import in_features
from preproj.adapter.sites.expressions import UNKNOWN, is_dropout, is_gate, is_norm
from preproj.adapter.sites.flow import NORMED_STREAM, STREAM, Branch, Entry, NotUnderstoodError, Sum
from preproj.adapter.sites.source import Scope, arguments, bind, body, calls, forward

UNCHANGING_METHODS = {"to", "type", "float", "contiguous", "clone", "type_as"}


class Calls:
    """The part of the reader that follows calls, into other functions where it has to.

    Args:
        attention: the module that is followed.
    """

    def __init__(self, attention: nn.Module):
        self.attention = attention
        self.entry: Entry | None = None
        self._inside = False
        self._depth = 0

    def _run(self, scope: Scope) -> Any:
        raise NotImplementedError

    def _value(self, expression: ast.expr, scope: Scope) -> Any:
        raise NotImplementedError

    def _called(self, call: ast.Call, scope: Scope) -> Any:  # noqa: PLR0911  # one for each kind of call
        target = self._resolve(call.func, scope)
        if target is self.attention and not self._inside:
            return self._enter(call, scope)
        values = [self._value(argument, scope) for argument in arguments(call)]
        branch = next((v for v in values if isinstance(v, Branch | Sum)), None)
        if isinstance(target, nn.Module):
            if self._inside and target in self.attention.children() and branch is None:
                return Branch(target)
            if self.attention is not target and any(m is self.attention for m in target.modules()):
                return self._inline(forward(target), target, call, scope)
            if branch is None:
                if is_norm(target) and STREAM in values:
                    return NORMED_STREAM
                return values[0] if values and is_dropout(target) else None
            if is_dropout(target) or (isinstance(branch, Sum) and is_norm(target)):
                return branch
            if isinstance(branch, Sum):
                raise NotUnderstoodError(f"the residual sum goes through {type(target).__name__} unstored")
            if STREAM in values:
                return self._inline(forward(target), target, call, scope)
            if not (is_norm(target) or is_gate(target) or in_features(target) is not None):
                raise NotUnderstoodError(f"`{ast.unparse(call.func)}(...)` stands between it and the residual sum")
            return Branch(target, parallel=branch.parallel)
        if inspect.ismethod(target) and target.__self__ is scope.module and (branch or self._mentions(target)):
            return self._inline(target.__func__, scope.module, call, scope)
        return self._function(call, values, scope)

    def _function(self, call: ast.Call, values: list[Any], scope: Scope) -> Any:
        """Tell what a call of a plain function or of a tensor's method is."""
        name = ast.unparse(call.func).rsplit(".", 1)[-1]
        helper = scope.function.__globals__.get(name) if isinstance(call.func, ast.Name) else None
        if inspect.isfunction(helper) and STREAM in values and any(isinstance(v, Branch) for v in values):
            return self._inline(helper, scope.module, call, scope)
        if name == "dropout" and values:
            return values[0]
        if isinstance(call.func, ast.Attribute):
            owner = self._value(call.func.value, scope)
            if name in UNCHANGING_METHODS:
                return owner
            if isinstance(owner, Branch | Sum) and not self._inside:
                raise NotUnderstoodError(f"`.{name}(...)` stands between it and the residual sum")
        if any(isinstance(v, Branch | Sum) for v in values):
            raise NotUnderstoodError(f"`{name}(...)` stands between it and the residual sum")
        return None

    def _enter(self, call: ast.Call, scope: Scope) -> Branch:
        """Record where x̂ enters; follow attention itself if it is handed the residual stream besides."""
        function = forward(self.attention)
        bound = bind(function, call)
        if not bound:
            raise NotUnderstoodError(f"`{ast.unparse(call)}` does not name what it takes")
        (_, hidden), *others = bound.items()
        same = [name for name, argument in bound.items() if ast.unparse(argument) == ast.unparse(hidden)]
        positions = list(inspect.signature(function).parameters)
        is_stream = self._value(hidden, scope) == STREAM
        entry = Entry(tuple((positions.index(name) - 1, name) for name in same), is_stream)
        if self.entry not in (None, entry):
            raise NotUnderstoodError("it is called in more than one way")
        self.entry = entry
        if any(self._value(argument, scope) == STREAM for name, argument in others if name not in same):
            self._inside = True
            self._run(Scope(self.attention, {n: self._value(a, scope) for n, a in others}, function))
            raise NotUnderstoodError(f"{type(self.attention).__name__} takes the residual stream and adds it nowhere")
        return Branch(self.attention)

    def _inline(self, function: Callable[..., Any], module: nn.Module, call: ast.Call, scope: Scope) -> Any:
        bound = bind(function, call)
        variables = {name: self._value(argument, scope) for name, argument in bound.items()}
        constants = {n: known for n, argument in bound.items() if (known := scope.static(argument)) is not UNKNOWN}
        returned = self._run(Scope(module, variables, function, constants))
        return None if returned is UNKNOWN else returned

    def _mentions(self, method: Any) -> bool:
        """Whether a method of the block calls the attention module."""
        scope = Scope(method.__self__, {}, method.__func__)
        return any(self._resolve(n.func, scope) is self.attention for s in body(method.__func__) for n in calls(s))

    @staticmethod
    def _resolve(function: ast.expr, scope: Scope) -> Any:
        """Return the module or bound method that ``self.a.b[0]`` names, or None."""
        if not ast.unparse(function).startswith("self."):
            return None
        value = scope.static(function)
        return None if value is UNKNOWN else value
