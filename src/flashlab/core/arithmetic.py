"""Pluralised counts, and safe evaluation of the arithmetic in kernel constants and claim formulas."""

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
    """Format a count with its noun: `1 run`, `4 runs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def calculated(formula: str, values: Mapping[str, float]) -> float:
    """Evaluate an arithmetic expression in Python syntax without executing it; comparisons give 1 or 0.

    Raises:
        ValueError: the formula has anything but numbers, the names in `values` and arithmetic.
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
