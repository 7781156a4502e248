"""Keep a model's text away from eval(): some of reasoning_gym's scorers run the answer as Python.

In reasoning_gym 0.1.25 four scorers call eval() and five sympy.parse_expr(), which also calls eval(). So
"__import__('os')..." would run on the worker, and "9**9**9**9" would never return. This module checks the answer's
syntax tree first; an answer that is neither plain data nor plain arithmetic is refused and not scored.

Two limits: an answer "Integral(f, x)", which intermediate_integration sometimes gives itself and accepts, is refused;
the evaluated integral is accepted. And sympy.simplify, which that scorer calls, may still take minutes on a harmless
but strange product of functions.
"""

import ast

EVALUATED_AS_DATA = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
EVALUATED_AS_ARITHMETIC = frozenset(
    {"countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"}
)
FUNCTIONS = frozenset({"exp", "log", "sin", "cos", "tan", "asin", "acos", "atan", "sqrt"})
MAX_CHARACTERS = 500
MAX_NUMBER = 10**12
MAX_EXPONENT = 50

_DATA = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub)
_ARITHMETIC = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp, ast.Call),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow),
)


def is_harmless(generator: str, answer: str) -> bool:
    """Return whether the answer is safe for the scorer of this generator."""
    if generator in EVALUATED_AS_DATA:
        tree = _parse(answer)
        return tree is None or all(isinstance(node, _DATA) for node in ast.walk(tree))
    if generator in EVALUATED_AS_ARITHMETIC:
        # Text that does not parse is not harmless here: sympy rewrites it first ("9!" becomes a call).
        tree = _parse(answer) if len(answer) <= MAX_CHARACTERS else None
        return tree is not None and all(_is_small_arithmetic(node) for node in ast.walk(tree))
    return True


def _parse(answer: str) -> ast.Expression | None:
    try:
        return ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _is_small_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return _is_number(node, MAX_NUMBER)
    if isinstance(node, ast.Call):
        return _is_plain_call(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return not _contains(node.left, ast.Pow) and _is_small_exponent(node.right)
    return isinstance(node, _ARITHMETIC)


def _is_plain_call(node: ast.Call) -> bool:
    """Return whether a call has one argument without a call in it: exp(exp(exp(99))) fills the memory."""
    known = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
    return known and len(node.args) == 1 and not node.keywords and not _contains(node.args[0], ast.Call)


def _is_small_exponent(node: ast.AST) -> bool:
    """Return whether an exponent is a name, a number, or a fraction such as 3/2, with or without a sign."""
    if isinstance(node, ast.UnaryOp):
        return _is_small_exponent(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _is_number(node.left, MAX_EXPONENT) and _is_number(node.right, MAX_EXPONENT)
    return isinstance(node, ast.Name) or _is_number(node, MAX_EXPONENT)


def _is_number(node: ast.AST, largest: int) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, int | float) and value <= largest


def _contains(node: ast.AST, kind: type[ast.AST]) -> bool:
    return any(isinstance(part, kind) for part in ast.walk(node))
