"""
Two shortcuts for math-verify, in the processes that judge answers, that change its time and not its results.

- Its parser looks ahead in ANTLR's full mode (LL). The simpler one (SLL) takes a third of the time, and by ANTLR's
  documentation either gives the same tree or reports a syntax error; then the full one is asked.
- For an answer that is wrong it lets sympy simplify the difference to the gold by all means, to see that it is not
  zero. A point where the difference is not zero shows the same. Where none is found, as for all answers that are
  right, the comparison goes on as ever.

Both replace private functions, which a minor release of math-verify may change: hence the bound on its version.
"""

import functools
from typing import Any


# Far above the error of sympy's evaluation, which is to 15 digits whatever cancels.
_CLEARLY_NOT_ZERO = 1e-6
# A larger power of a sum is not quickly evaluated.
_MAX_EXPONENT = 100
# Those that sympy evaluates to the digits that are asked for, and not from a rounded argument as the others.
_FUNCTIONS = {"sin", "cos", "log", "exp", "Abs"}


def install() -> None:
    """Have math-verify take both shortcuts from now on, in this process."""
    _parse_simply_first()
    _evaluate_first()


def _parse_simply_first() -> None:
    from antlr4 import PredictionMode
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

    create_parser = _Latex2Sympy.create_parser

    @functools.wraps(create_parser)
    def create_simple_parser(self: Any, latex: str) -> Any:
        parser = create_parser(self, latex)
        parser._interp.predictionMode = PredictionMode.SLL

        def math() -> Any:
            try:
                return type(parser).math(parser)
            except Exception:
                return create_parser(self, latex).math()

        parser.math = math
        return parser

    _Latex2Sympy.create_parser = create_simple_parser


def _evaluate_first() -> None:
    from math_verify import grader

    simplify_and_compare = grader.sympy_symbolic_eq

    @functools.wraps(simplify_and_compare)
    def compare(gold: Any, answer: Any) -> bool:
        return not surely_differ(gold, answer) and simplify_and_compare(gold, answer)

    grader.sympy_symbolic_eq = compare


def surely_differ(left: Any, right: Any) -> bool:
    """
    Whether a point is found where two expressions clearly differ.

    Args:
        left (`sympy.Expr`):
            An expression.
        right (`sympy.Expr`):
            Another.

    Returns:
        `bool`: `False` says nothing.

    Example:

    ```python
    >>> from sympy import Symbol, sqrt

    >>> surely_differ(sqrt(8), sqrt(7)), surely_differ(sqrt(8), 2 * sqrt(2)), surely_differ(Symbol("x"), Symbol("y"))
    (True, False, True)

    ```
    """
    from sympy import Expr

    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return False
    try:
        if not (_is_elementary(left) and _is_elementary(right)):
            return False
        difference = left - right
        # Some positive values that no answer singles out.
        symbols = sorted(difference.free_symbols, key=str)
        point = {symbol: 0.7390851 + 0.2113249 * position for position, symbol in enumerate(symbols)}
        # Strict: where more digits cancel than it carries, sympy would return what is left of them.
        return bool(abs(difference.evalf(15, subs=point, strict=True)) > _CLEARLY_NOT_ZERO)
    except Exception:  # an undefined value, one that cannot be compared, or too many digits cancel
        return False


def _is_elementary(expression: Any) -> bool:
    from sympy import preorder_traversal

    return all(map(_is_elementary_node, preorder_traversal(expression)))


def _is_elementary_node(node: Any) -> bool:
    if node.is_Pow:
        return bool(node.exp.is_Number and abs(node.exp) <= _MAX_EXPONENT)
    if node.is_Number:
        # A decimal is rounded to a binary number. 1.6 * 10^12 - 1600000000000 is not zero, but is simplified to zero.
        return node.is_finite is True and not node.is_Float
    return bool(
        node.is_NumberSymbol or node.is_Symbol or node.is_Add or node.is_Mul or type(node).__name__ in _FUNCTIONS
    )
