"""Reads in a block's own ``forward`` how attention reaches the residual sum.

No list of architectures: the source that will run is followed, statement by statement, from the call of the attention
module to the sum with the residual stream. Three things are told apart: the *stream* (the block's input), the
*branch* (attention's output and what was made of it) and everything else.

===============================  ==================================================================================
what the source does             what it means
===============================  ==================================================================================
``residual + branch``            the sum: the skip is added to the branch just before it
``branch + other``               still the branch: a parallel MLP joins it
``self.norm(branch)``            the skip lands on that module's output; so for a layer scale, an output projection
``branch * number``              a multiplier: the skip is divided by it, so that it joins the stream unscaled
``branch * gate``                a gate: right only if a module follows, whose output the skip lands on
dropout, casts, ``branch[0]``    no change
views, permutations, windows     no change: tokens move whole, and the method knows no positions
anything else on the branch      not understood, and refused
===============================  ==================================================================================
"""

import ast
import inspect
from dataclasses import replace
from typing import Any

from torch import nn

from preproj.adapter.sites.calls import Calls
from preproj.adapter.sites.expressions import UNKNOWN
from preproj.adapter.sites.flow import (
    STREAM,
    Branch,
    FoundSumError,
    NotUnderstoodError,
    Sum,
    added,
    either,
    moved,
    scaled,
)
from preproj.adapter.sites.source import Scope, body, calls, forward, loaded, nodes

MAX_DEPTH = 6


class Reader(Calls):
    """Follows one attention module through the block that calls it.

    Args:
        attention: the module.
    """

    def read(self, block: nn.Module) -> Branch | None:
        """Follow a block's forward, whose first argument is the residual stream.

        Returns:
            The branch at the residual sum, or None if the block returns the branch without a sum.

        Raises:
            NotUnderstoodError: with the step that is not known.
        """
        function = forward(block)
        parameters = list(inspect.signature(function).parameters)
        if len(parameters) < 2:
            raise NotUnderstoodError(f"{type(block).__name__}.forward takes no hidden states")
        try:
            value = self._run(Scope(block, {parameters[1]: STREAM}, function))
        except FoundSumError as found:
            return found.branch
        if isinstance(value, Branch):
            return None
        if self.entry is None:
            raise NotUnderstoodError(f"{type(block).__name__}.forward does not call it directly")
        raise NotUnderstoodError(f"{type(block).__name__}.forward adds it to no residual stream that could be followed")

    def _run(self, scope: Scope) -> Any:
        if self._depth > MAX_DEPTH:
            raise NotUnderstoodError("its block nests too many calls")
        self._depth += 1
        try:
            return self._statements(body(scope.function), scope)
        finally:
            self._depth -= 1

    def _statements(self, statements: list[ast.stmt], scope: Scope) -> Any:
        """Follow statements in order; return the value of a ``return`` reached, else ``UNKNOWN``."""
        for number, statement in enumerate(statements):
            try:
                returned = self._statement(statement, scope)
            except FoundSumError:
                self._refuse_second_use(statement, statements[number + 1 :], scope)
                raise
            if returned is not UNKNOWN:
                return returned
        return UNKNOWN

    def _statement(self, statement: ast.stmt, scope: Scope) -> Any:
        """Follow one statement; return the value of a ``return`` reached, else ``UNKNOWN``."""
        match statement:
            case ast.Assign(targets=[target], value=value):
                self._assign(target, value, scope)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, value, scope)
            case ast.AugAssign(target=target, op=operator, value=value):
                self._assign(target, ast.BinOp(loaded(target), operator, value), scope)
            case ast.Expr(value=value):
                self._value(value, scope)
            case ast.Return(value=value):
                returned = self._value(value, scope) if value else None
                self._stop_at_sum(returned)
                return returned
            case ast.If():
                return self._branches(statement, scope)
            case ast.With(body=body):
                return self._statements(body, scope)
            case ast.For() | ast.While() | ast.Try():
                self._pass_over(statement, scope)
            case _:
                pass
        return UNKNOWN

    def _refuse_second_use(self, at: ast.stmt, after: list[ast.stmt], scope: Scope) -> None:
        """Raise if what was added to the stream is read again after the sum, so that the skip would go there too."""
        written = {n.id for n in nodes([at, *after], ast.Name) if not isinstance(n.ctx, ast.Load)}
        branches = {name for name, value in scope.variables.items() if isinstance(value, Branch)} - written
        # Of a tuple, only the first part is the branch.
        others = {id(n.value) for n in nodes(after, ast.Subscript) if ast.unparse(n.slice) != "0"}
        if any(n.id in branches and id(n) not in others for n in nodes(after, ast.Name)):
            raise NotUnderstoodError("its output is used twice")

    def _pass_over(self, statement: ast.stmt, scope: Scope) -> None:
        """Leave a loop or try unread, which is right only where it has nothing to do with attention."""
        changed = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        touched = any(isinstance(scope.variables.get(name), Branch) for name in changed)
        if touched or any(self._resolve(n.func, scope) is self.attention for n in calls(statement)):
            raise NotUnderstoodError("it stands in a loop or a try")
        for name in changed:
            scope.assign(ast.Name(name), None, UNKNOWN)

    def _assign(self, target: ast.expr, expression: ast.expr, scope: Scope) -> None:
        value = self._value(expression, scope)
        if not self._inside:
            self._stop_at_sum(value)
        if isinstance(target, ast.Subscript | ast.Attribute) and (
            isinstance(value, Branch) or isinstance(self._value(target.value, scope), Branch)
        ):
            raise NotUnderstoodError(f"`{ast.unparse(target)}` is assigned between it and the residual sum")
        scope.assign(target, value, scope.static(expression))

    def _branches(self, statement: ast.If, scope: Scope) -> Any:
        """Follow the side that will run or, where that is only known at run time, both, which must agree."""
        known = scope.static(statement.test)
        if known is not UNKNOWN:
            return self._statements(statement.body if known else statement.orelse, scope)
        before = dict(scope.variables)
        ends: list[tuple[Any, Branch | None, dict[str, Any]]] = []
        for side in (statement.body, statement.orelse):
            own = replace(scope, variables=dict(before), constants=dict(scope.constants))
            try:
                ends.append((self._statements(side, own), None, own.variables))
            except FoundSumError as found:
                ends.append((UNKNOWN, found.branch, own.variables))
        (_, first, one), (_, second, two) = ends
        if first != second:
            raise NotUnderstoodError(f"the sum depends on `{ast.unparse(statement.test)}`")
        if first is not None:
            raise FoundSumError(first)
        for name in one.keys() | two.keys():
            value = either(one.get(name), two.get(name), statement.test)
            if one.get(name) == STREAM and ast.unparse(statement.test) == f"{name} is None":
                value = STREAM  # for an argument that was not given
            if not (value == before.get(name) and name in before):
                scope.assign(ast.Name(name), value, UNKNOWN)
        returned = [end for end, _, _ in ends if end is not UNKNOWN]
        return returned[0] if len(returned) == 2 else UNKNOWN

    @staticmethod
    def _stop_at_sum(value: Any) -> None:
        if isinstance(value, Sum):
            raise FoundSumError(value.branch)

    def _value(self, expression: ast.expr, scope: Scope) -> Any:  # noqa: PLR0911  # one for each kind
        """Tell what an expression is: ``STREAM``, a ``Branch``, a ``Sum``, or None for everything else."""
        match expression:
            case ast.Name(id=name):
                return scope.variables.get(name)
            case ast.Tuple(elts=[first, *_]):
                return self._value(first, scope)
            case ast.Subscript(value=value, slice=ast.Constant(value=0)):
                return self._value(value, scope)
            case ast.Subscript(value=value, slice=ast.Tuple(elts=[*_, ast.Slice(lower=None, upper=None, step=None)])):
                return moved(self._value(value, scope))  # some of the tokens
            case ast.IfExp(test=test, body=body, orelse=orelse):
                known = scope.static(test)
                if known is not UNKNOWN:
                    return self._value(body if known else orelse, scope)
                return either(self._value(body, scope), self._value(orelse, scope), test)
            case ast.BinOp(left=ast.Tuple() as left, op=ast.Add()):
                return self._value(left, scope)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return added(self._value(left, scope), self._value(right, scope))
            case ast.BinOp():
                return self._scaled(expression, scope)
            case ast.Call():
                return self._called(expression, scope)
            case _:
                return None

    def _scaled(self, expression: ast.BinOp, scope: Scope) -> Any:
        """Tell what a product, quotient or difference is."""
        left, right = self._value(expression.left, scope), self._value(expression.right, scope)
        value, other = (left, expression.right) if left is not None else (right, expression.left)
        number = scope.static(other)
        if isinstance(value, Branch | Sum):
            if isinstance(expression.op, ast.Div) and left is None:
                raise NotUnderstoodError(f"`{ast.unparse(expression)}` stands between it and the residual sum")
            return scaled(value, number, expression)
        return value if isinstance(expression.op, ast.Mult) and number is not UNKNOWN else None
