"""Numbers in words, and arithmetic on numbers and names, as kernels' constants and claims' formulas write it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_OPERATIONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.LShift: operator.lshift},
    **{ast.Eq: operator.eq, ast.Lt: operator.lt, ast.Gt: operator.gt},
}


def several(number: int, noun: str) -> str:
    """`1 run`, `4 runs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def calculated(formula: str, values: Mapping[str, float]) -> float:
    """The value of an expression in Python's syntax, which is not executed; what compares is 1 or 0.

    Raises:
        ValueError: something else than numbers, those names and arithmetic stands in it.
    """

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int(number) | float(number)):
                return number
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(left), value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATIONS:
                return int(_OPERATIONS[type(op)](value(left), value(right)))
            case ast.BoolOp(op=op, values=parts):
                return int((all if isinstance(op, ast.And) else any)(map(value, parts)))
        raise ValueError(f"formula {formula!r}: wanted numbers and {', '.join(values)}, got {ast.unparse(node)!r}")

    try:
        result: float = value(ast.parse(formula, mode="eval").body)
        return result
    except SyntaxError as error:
        raise ValueError(f"formula {formula!r}: {error}") from error
