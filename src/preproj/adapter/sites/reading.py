"""Reads in a block's own ``forward`` how attention reaches the residual sum.

No list of architectures: the source that will run is followed, statement by statement, from the call of the attention
module to the sum with the residual stream. Three things are told apart: the *stream* (the block's input), the
*branch* (attention's output and what was made of it) and everything else.

===============================  ==================================================================================
what the source does             what it means
===============================  ==================================================================================
``residual + branch``            the sum: the skip is added to the branch just before it
``branch + other``               still the branch: a parallel MLP joins it
``self.module(branch)``          the skip lands on that module's output: a norm, a layer scale, an output projection
``branch * number``              a multiplier: the skip is divided by it, so that it joins the stream unscaled
dropout, casts, ``branch[0]``    no change
anything else on the branch      not understood, and refused
===============================  ==================================================================================
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import nn

from preproj.adapter.sites.expressions import NUMBER_OPERATIONS, UNKNOWN, is_dropout, is_norm, static_value

STREAM = "stream"
NORMED_STREAM = "normed stream"
UNCHANGING_METHODS = {"to", "type", "float", "contiguous", "clone", "type_as"}
MAX_DEPTH = 6


class NotUnderstoodError(Exception):
    """The way from attention to the residual sum holds a step that this reader does not know."""


@dataclass(frozen=True)
class Branch:
    """Attention's output on its way to the sum.

    Args:
        landing: the last module it went through; the skip is added to that module's output.
        multiplier: product of the numbers it is multiplied by after ``landing``.
        parallel: whether another branch was added to it.
    """

    landing: nn.Module
    multiplier: float = 1.0
    parallel: bool = False


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
class _Sum:
    branch: Branch


class _FoundSumError(Exception):
    def __init__(self, branch: Branch):
        super().__init__()
        self.branch = branch


@dataclass
class _Scope:
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


class Reader:
    """Follows one attention module through the block that calls it.

    Args:
        attention: the module.
    """

    def __init__(self, attention: nn.Module):
        self.attention = attention
        self.entry: Entry | None = None
        self._inside = False
        self._depth = 0

    def read(self, block: nn.Module) -> Branch | None:
        """Follow a block's forward, whose first argument is the residual stream.

        Returns:
            The branch at the residual sum, or None if the block returns the branch without a sum.

        Raises:
            NotUnderstoodError: with the step that is not known.
        """
        function = _forward(block)
        parameters = list(inspect.signature(function).parameters)
        if len(parameters) < 2:
            raise NotUnderstoodError(f"{type(block).__name__}.forward takes no hidden states")
        try:
            value = self._run(_Scope(block, {parameters[1]: STREAM}, function))
        except _FoundSumError as found:
            return found.branch
        if isinstance(value, Branch):
            return None
        if self.entry is None:
            raise NotUnderstoodError(f"{type(block).__name__}.forward does not call it directly")
        raise NotUnderstoodError(f"{type(block).__name__}.forward adds it to no residual stream that could be followed")

    def _run(self, scope: _Scope) -> Any:
        if self._depth > MAX_DEPTH:
            raise NotUnderstoodError("its block nests too many calls")
        self._depth += 1
        try:
            return self._statements(_body(scope.function), scope)
        finally:
            self._depth -= 1

    def _statements(self, statements: list[ast.stmt], scope: _Scope) -> Any:
        """Follow statements in order; return the value of a ``return`` reached, else ``UNKNOWN``."""
        for statement in statements:
            match statement:
                case ast.Assign(targets=[target], value=value):
                    self._assign(target, value, scope)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign(target, value, scope)
                case ast.AugAssign(target=target, op=operator, value=value):
                    self._assign(target, ast.BinOp(_loaded(target), operator, value), scope)
                case ast.Expr(value=value):
                    self._value(value, scope)
                case ast.Return(value=value):
                    returned = self._value(value, scope) if value else None
                    self._stop_at_sum(returned)
                    return returned
                case ast.If():
                    returned = self._branches(statement, scope)
                    if returned is not UNKNOWN:
                        return returned
                case ast.With(body=body):
                    returned = self._statements(body, scope)
                    if returned is not UNKNOWN:
                        return returned
                case ast.For() | ast.While() | ast.Try():
                    if any(self._resolve(n.func, scope) is self.attention for n in _calls(statement)):
                        raise NotUnderstoodError("it is called in a loop or a try")
                case _:
                    pass
        return UNKNOWN

    def _assign(self, target: ast.expr, expression: ast.expr, scope: _Scope) -> None:
        value = self._value(expression, scope)
        self._stop_at_sum(value)
        scope.assign(target, value, scope.static(expression))

    def _branches(self, statement: ast.If, scope: _Scope) -> Any:
        """Follow the side that will run or, where that is only known at run time, both, which must agree."""
        known = scope.static(statement.test)
        if known is not UNKNOWN:
            return self._statements(statement.body if known else statement.orelse, scope)
        before = dict(scope.variables)
        ends = []
        for side in (statement.body, statement.orelse):
            own = replace(scope, variables=dict(before), constants=dict(scope.constants))
            try:
                ends.append((self._statements(side, own), None, own.variables))
            except _FoundSumError as found:
                ends.append((UNKNOWN, found.branch, own.variables))
        (_, first, one), (_, second, two) = ends
        if first != second:
            raise NotUnderstoodError(f"the sum depends on `{ast.unparse(statement.test)}`")
        if first is not None:
            raise _FoundSumError(first)
        for name in one.keys() | two.keys():
            value = self._either(one.get(name), two.get(name), statement.test)
            if not (value == before.get(name) and name in before):
                scope.assign(ast.Name(name), value, UNKNOWN)
        returned = [end for end, _, _ in ends if end is not UNKNOWN]
        return returned[0] if len(returned) == 2 else UNKNOWN

    @staticmethod
    def _either(one: Any, two: Any, test: ast.expr) -> Any:
        """Tell what a variable is after a condition that is only known at run time."""
        if isinstance(one, Branch) and isinstance(two, Branch):
            one, two = (replace(branch, parallel=one.parallel or two.parallel) for branch in (one, two))
        if one != two and (isinstance(one, Branch) or isinstance(two, Branch)):
            raise NotUnderstoodError(f"its output depends on `{ast.unparse(test)}`")
        return one if one == two else None

    @staticmethod
    def _stop_at_sum(value: Any) -> None:
        if isinstance(value, _Sum):
            raise _FoundSumError(value.branch)

    def _value(self, expression: ast.expr, scope: _Scope) -> Any:
        """Tell what an expression is: ``STREAM``, a ``Branch``, a ``_Sum``, or None for everything else."""
        match expression:
            case ast.Name(id=name):
                return scope.variables.get(name)
            case ast.Tuple(elts=[first, *_]):
                return self._value(first, scope)
            case ast.Subscript(value=value, slice=ast.Constant(value=0)):
                return self._value(value, scope)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                known = scope.static(test)
                if known is not UNKNOWN:
                    return self._value(body if known else orelse, scope)
                return self._either(self._value(body, scope), self._value(orelse, scope), test)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._added(self._value(left, scope), self._value(right, scope))
            case ast.BinOp():
                return self._scaled(expression, scope)
            case ast.Call():
                return self._called(expression, scope)
            case _:
                return None

    @staticmethod
    def _added(left: Any, right: Any) -> Any:
        values = (left, right)
        sums = [v for v in values if isinstance(v, _Sum)]
        branches = [v for v in values if isinstance(v, Branch)]
        if len(sums) + len(branches) > 1:
            raise NotUnderstoodError("its output is used twice")
        if sums:
            return _Sum(replace(sums[0].branch, parallel=True))
        if branches and (STREAM in values or NORMED_STREAM in values):
            return _Sum(branches[0])
        if branches:
            return replace(branches[0], parallel=True)
        return STREAM if STREAM in values else None

    def _scaled(self, expression: ast.BinOp, scope: _Scope) -> Any:
        left, right = self._value(expression.left, scope), self._value(expression.right, scope)
        value, other = (left, expression.right) if left is not None else (right, expression.left)
        number = scope.static(other)
        if not isinstance(value, Branch | _Sum):
            return value if isinstance(expression.op, ast.Mult) and number is not UNKNOWN else None
        operation = NUMBER_OPERATIONS.get(type(expression.op))
        divisor = isinstance(expression.op, ast.Div) and left is None
        if not isinstance(number, int | float) or not operation or divisor or isinstance(value, _Sum):
            raise NotUnderstoodError(f"`{ast.unparse(expression)}` stands between it and the residual sum")
        multiplier = operation(value.multiplier, number)
        if not multiplier:
            raise NotUnderstoodError(f"`{ast.unparse(expression)}` switches its branch off")
        return replace(value, multiplier=multiplier)

    def _called(self, call: ast.Call, scope: _Scope) -> Any:
        target = self._resolve(call.func, scope)
        if target is self.attention and not self._inside:
            return self._enter(call, scope)
        values = [self._value(argument, scope) for argument in _arguments(call)]
        branch = next((v for v in values if isinstance(v, Branch | _Sum)), None)
        if isinstance(target, nn.Module):
            if self._inside and target in self.attention.children() and branch is None:
                return Branch(target)
            if self.attention is not target and any(m is self.attention for m in target.modules()):
                return self._inline(_forward(target), target, call, scope)
            if branch is None:
                if is_norm(target) and STREAM in values:
                    return NORMED_STREAM
                return values[0] if values and is_dropout(target) else None
            if is_dropout(target) or (isinstance(branch, _Sum) and is_norm(target)):
                return branch
            if isinstance(branch, _Sum):
                raise NotUnderstoodError(f"the residual sum goes through {type(target).__name__} unstored")
            if STREAM in values:
                return self._inline(_forward(target), target, call, scope)
            return Branch(target, parallel=branch.parallel)
        if inspect.ismethod(target) and target.__self__ is scope.module and (branch or self._mentions(target)):
            return self._inline(target.__func__, scope.module, call, scope)
        return self._function(call, values, scope)

    def _function(self, call: ast.Call, values: list[Any], scope: _Scope) -> Any:
        """Tell what a call of a plain function or of a tensor's method is."""
        name = ast.unparse(call.func).rsplit(".", 1)[-1]
        helper = scope.function.__globals__.get(name) if isinstance(call.func, ast.Name) else None
        if inspect.isfunction(helper) and STREAM in values and any(isinstance(v, Branch) for v in values):
            return self._inline(helper, scope.module, call, scope)
        if name == "dropout":
            return values[0]
        if isinstance(call.func, ast.Attribute):
            owner = self._value(call.func.value, scope)
            if name in UNCHANGING_METHODS:
                return owner
            if isinstance(owner, Branch | _Sum) and not self._inside:
                raise NotUnderstoodError(f"`.{name}(...)` stands between it and the residual sum")
        if any(isinstance(v, Branch | _Sum) for v in values):
            raise NotUnderstoodError(f"`{name}(...)` stands between it and the residual sum")
        return None

    def _enter(self, call: ast.Call, scope: _Scope) -> Branch:
        """Record where x̂ enters; follow attention itself if it is handed the residual stream besides."""
        function = _forward(self.attention)
        bound = _bind(function, call)
        (first, hidden), *others = bound.items()
        same = [name for name, argument in bound.items() if ast.unparse(argument) == ast.unparse(hidden)]
        positions = list(inspect.signature(function).parameters)
        is_stream = self._value(hidden, scope) == STREAM
        entry = Entry(tuple((positions.index(name) - 1, name) for name in same), is_stream)
        if self.entry not in (None, entry):
            raise NotUnderstoodError("it is called in more than one way")
        self.entry = entry
        if any(self._value(argument, scope) == STREAM for name, argument in others if name not in same):
            self._inside = True
            self._run(_Scope(self.attention, {n: self._value(a, scope) for n, a in others}, function))
            raise NotUnderstoodError(f"{type(self.attention).__name__} takes the residual stream and adds it nowhere")
        return Branch(self.attention)

    def _inline(self, function: Callable[..., Any], module: nn.Module, call: ast.Call, scope: _Scope) -> Any:
        bound = _bind(function, call)
        variables = {name: self._value(argument, scope) for name, argument in bound.items()}
        constants = {n: known for n, argument in bound.items() if (known := scope.static(argument)) is not UNKNOWN}
        returned = self._run(_Scope(module, variables, function, constants))
        return None if returned is UNKNOWN else returned

    def _mentions(self, method: Any) -> bool:
        """Whether a method of the block calls the attention module."""
        scope = _Scope(method.__self__, {}, method.__func__)
        return any(self._resolve(n.func, scope) is self.attention for s in _body(method.__func__) for n in _calls(s))

    @staticmethod
    def _resolve(function: ast.expr, scope: _Scope) -> Any:
        """Return the module or bound method that ``self.a.b[0]`` names, or None."""
        if not ast.unparse(function).startswith("self."):
            return None
        value = scope.static(function)
        return None if value is UNKNOWN else value


def first_argument(module: nn.Module) -> tuple[int, str]:
    """Return position and name of the first argument of a module's forward."""
    return 0, list(inspect.signature(_forward(module)).parameters)[1]


def _forward(module: nn.Module) -> Callable[..., Any]:
    return inspect.unwrap(type(module).forward)


@cache
def _body(function: Callable[..., Any]) -> list[ast.stmt]:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise NotUnderstoodError(f"the source of {function.__qualname__} cannot be read") from error
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition.body


def _calls(node: ast.AST) -> list[ast.Call]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Call)]


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg)]


def _bind(function: Callable[..., Any], call: ast.Call) -> dict[str, ast.expr]:
    """Map parameter names of a method to the expressions of a call, in the order of the parameters."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    given = dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
    return {name: given[name] for name in names if name in given}


def _loaded(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body
