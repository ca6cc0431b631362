"""A calculator for what a model writes: numbers, operators and a few functions, walked as a syntax tree.

Nothing is evaluated by Python: what is not in the tables below is refused by name. Every step is bounded before it is
computed, so that no expression takes long or much memory.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

MOST_LETTERS = 300
_MOST_BITS = 4096  # of a whole number: some 1,200 digits
Number = int | float


class Refused(Exception):
    """What is wrong with an expression."""


_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_UNARY: Mapping[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def _round(value: Number, digits: Number = 0) -> Number:
    """Bounded: Python's own would raise ten to any power."""
    if abs(digits) > 20:
        raise Refused("round takes at most 20 digits")
    return round(value, int(digits)) if digits else round(value)


_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
    "log10": math.log10, "log2": math.log2, "sin": math.sin, "cos": math.cos, "tan": math.tan, "floor": math.floor,
    "ceil": math.ceil,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> str:
    """The value as text. Raises Refused with the reason."""
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    if len(text) > MOST_LETTERS:
        raise Refused(f"the expression has {len(text)} letters; at most {MOST_LETTERS} are read")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise Refused(f"{expression.strip()!r} is no expression") from None
    except ZeroDivisionError:
        raise Refused("division by zero") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        raise Refused(str(error)) from None
    return str(value) if isinstance(value, int) else _short(value)


def _short(value: float) -> str:
    if not math.isfinite(value):
        raise Refused("the value is no finite number")
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(left, right))
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in _FUNCTIONS:
            raise Refused(f"{node.func.id} is not known here; known: {', '.join(_FUNCTIONS)}")
        return _bounded(_FUNCTIONS[node.func.id](*map(_value, node.args)))
    raise Refused(f"{ast.unparse(node)[:40]} is no arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    """Bounded before it is computed: 9**9**9 would take this machine's memory."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if base.bit_length() * exponent > _MOST_BITS:
            raise Refused("the power is too large")
        return int(base**exponent)
    value = base**exponent
    if isinstance(value, complex):
        raise Refused("the power is no real number")
    return float(value)


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise Refused("the number is too large")
    return value
