"""Calls in a block's source."""

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from preproj.adapter.sites.attention import in_features
from preproj.adapter.sites.expressions import UNKNOWN, is_dropout, is_gate, is_norm
from preproj.adapter.sites.flow import (
    INPUT,
    NORMED_STREAM,
    STREAM,
    Branch,
    CrossAttentionError,
    Entry,
    NotUnderstoodError,
    Sum,
    moved,
)
from preproj.adapter.sites.source import Scope, arguments, bind, body, calls, forward, nodes

UNCHANGING = {"to", "type", "float", "contiguous", "clone", "type_as"}
_KEY_OR_VALUE = re.compile(r"(key|value)(s|_states|_layer|_tensor)?$|[kv]$")
_SECOND_STREAM = re.compile(r"(?<!encoder)_hidden_states$")
MOVING_TOKENS = {"view", "reshape", "permute", "transpose", "flatten", "roll"}
REORDERING = {"roll", "flip"}


class Calls:
    """The part of the reader that follows calls, into other functions where it has to.

    Args:
        attention: the module that is followed.
    """

    def __init__(self, attention: nn.Module):
        self.attention = attention
        self.entry: Entry | None = None
        self._inside = False
        self.adds_its_input = False  # followed inside, to see whether it adds its own x̂ to the branch
        self._depth = 0
        self._input_reordered = False

    def _run(self, scope: Scope) -> Any:
        raise NotImplementedError

    def _value(self, expression: ast.expr, scope: Scope) -> Any:
        raise NotImplementedError

    def _called(self, call: ast.Call, scope: Scope) -> Any:
        target = self._resolve(call.func, scope)
        if target is self.attention and not self._inside:
            return self._enter(call, scope)
        values = [self._value(argument, scope) for argument in arguments(call)]
        branch = next((v for v in values if isinstance(v, Branch | Sum)), None)
        if isinstance(target, nn.Module):
            if self.attention is not target and any(m is self.attention for m in target.modules()):
                return self._inline(forward(target), target, call, scope)
            return self._through(target, branch, values, call, scope) if branch else self._beside(target, values)
        if inspect.ismethod(target) and target.__self__ in (scope.module, type(scope.module)):
            if branch:
                return self._follow(target.__func__, scope.module, call, scope)
            if self._mentions(target):
                return self._inline(target.__func__, scope.module, call, scope)
            names = {ast.unparse(inner.func).rsplit(".", 1)[-1] for inner in nodes(body(target.__func__), ast.Call)}
            self._input_reordered |= self.entry is None and not REORDERING.isdisjoint(names)
        return self._function(call, values, scope)

    def _beside(self, module: nn.Module, values: list[Any]) -> Any:
        """Tell what a module returns that is not handed the branch."""
        if self._inside and module in self.attention.children() and in_features(module) is not None:
            return None if any(v in {INPUT, STREAM, NORMED_STREAM} for v in values) else Branch(module)
        if is_norm(module) and STREAM in values:
            return NORMED_STREAM
        return values[0] if values and is_dropout(module) else None

    def _through(self, module: nn.Module, branch: Branch | Sum, values: list[Any], call: ast.Call, scope: Scope) -> Any:
        """Tell what a module returns that is handed the branch."""
        if isinstance(branch, Sum):
            if is_dropout(module) or is_norm(module):
                return branch
            raise NotUnderstoodError(f"the residual sum goes through {type(module).__name__} unstored")
        if is_dropout(module) and not (branch.gated_by or self.adds_its_input):
            return branch
        if STREAM in values:
            return self._inline(forward(module), module, call, scope)
        if is_norm(module) or is_gate(module) or is_dropout(module) or in_features(module) is not None:
            return branch.through(module)
        return self._follow(forward(module), module, call, scope)

    def _function(self, call: ast.Call, values: list[Any], scope: Scope) -> Any:
        """Tell what a call of a plain function or of a tensor's method is."""
        name = ast.unparse(call.func).rsplit(".", 1)[-1]
        helper = scope.function.__globals__.get(name) if isinstance(call.func, ast.Name) else None
        if inspect.isfunction(helper) and any(isinstance(v, Branch) for v in values):
            return self._follow(helper, scope.module, call, scope)
        if name == "dropout" and values:
            dropped = values[0]
            gated = self.adds_its_input and isinstance(dropped, Branch)
            return replace(dropped, gated_by=ast.unparse(call)) if gated else dropped
        if isinstance(call.func, ast.Attribute):
            owner = self._value(call.func.value, scope)
            if name in REORDERING and self.entry is None:
                self._input_reordered = True
            elif name in REORDERING and not self._input_reordered:  # else it is what moves them back
                raise NotUnderstoodError(f"`{name}(...)` moves its tokens before the residual sum")
            if name in UNCHANGING | MOVING_TOKENS:  # a tensor's method, or a function of torch
                value = owner or next(iter(values), None)
                return moved(value) if name in MOVING_TOKENS else value
            if isinstance(owner, Branch | Sum) and not self._inside:
                raise NotUnderstoodError(f"`.{name}(...)` stands between it and the residual sum")
        if any(isinstance(v, Branch | Sum) for v in values) and not self._inside:
            raise NotUnderstoodError(f"`{name}(...)` stands between it and the residual sum")
        return None

    def _enter(self, call: ast.Call, scope: Scope) -> Branch:
        """Record where x̂ enters; follow attention itself if it is handed the residual stream besides."""
        function = forward(self.attention)
        bound = bind(function, call)
        if not bound:
            raise NotUnderstoodError(f"`{ast.unparse(call)}` does not name what it takes")
        (first, hidden), *_ = bound.items()
        same = [name for name, argument in bound.items() if ast.unparse(argument) == ast.unparse(hidden)]
        values = {name: self._value(argument, scope) for name, argument in bound.items()}
        others = [name for name, argument in bound.items() if name not in same and ast.unparse(argument) != "None"]
        if any(_KEY_OR_VALUE.match(name) for name in others):
            if values[first] is None:
                raise CrossAttentionError("its queries are no part of the residual stream")
            raise NotUnderstoodError("its queries, keys and values are read from different tensors")
        if second := [name for name in others if _SECOND_STREAM.search(name)]:
            raise NotUnderstoodError(f"it reads a second stream, {second[0]}")
        positions = list(inspect.signature(function).parameters)
        entry = Entry(tuple((positions.index(name) - 1, name) for name in same), values[first] == STREAM)
        if self.entry not in (None, entry):
            raise NotUnderstoodError("it is called in more than one way")
        self.entry = entry
        self._inside = True
        if any(values[name] == STREAM for name in others):
            self._run(Scope(self.attention, values | dict.fromkeys(same, INPUT), function))
            raise NotUnderstoodError(f"{type(self.attention).__name__} takes the residual stream and adds it nowhere")
        try:
            self.adds_its_input = True
            self._run(Scope(self.attention, dict.fromkeys(same, STREAM), function))
        except NotUnderstoodError:
            pass  # inside attention much is not understood, and need not be
        self._inside = self.adds_its_input = False
        return Branch(self.attention)

    def _inline(self, function: Callable[..., Any], module: nn.Module, call: ast.Call, scope: Scope) -> Any:
        bound = bind(function, call)
        variables = {name: self._value(argument, scope) for name, argument in bound.items()}
        constants = {n: known for n, argument in bound.items() if (known := scope.static(argument)) is not UNKNOWN}
        returned = self._run(Scope(module, variables, function, constants))
        return None if returned is UNKNOWN else returned

    def _follow(self, function: Callable[..., Any], module: nn.Module, call: ast.Call, scope: Scope) -> Any:
        """Read a function that is handed the branch, which must come out of it again."""
        unknown = f"`{ast.unparse(call.func)}(...)` stands between it and the residual sum"
        try:
            returned = self._inline(function, module, call, scope)
        except NotUnderstoodError as error:
            raise NotUnderstoodError(unknown) from error
        if not isinstance(returned, Branch | Sum):
            raise NotUnderstoodError(unknown)
        return returned

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
