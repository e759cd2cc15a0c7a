"""Checks of plain arguments, with one form of error for all of them."""

import math
import numbers
from typing import Any


def check_int(name: str, value: Any, minimum: int) -> None:
    """Refuses what is not an integer from `minimum` on.

    Args:
        name: Name of the argument.
        value: Its value.
        minimum: Smallest value allowed.

    Raises:
        TypeError: If the value is not an integer.
        ValueError: If it is below the minimum.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}")
    if value < minimum:
        raise ValueError(
            f"`{name}` must be at least {minimum}. Received: {name}={value!r}"
        )


def check_number(name: str, value: Any, minimum: float = -math.inf) -> None:
    """Refuses what is not a finite number from `minimum` on.

    Args:
        name: Name of the argument.
        value: Its value.
        minimum: Smallest value allowed. Defaults to no bound.

    Raises:
        TypeError: If the value is not a real number.
        ValueError: If it is not finite or is below the minimum.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` must be a number. Received: {name}={value!r}")
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite. Received: {name}={value!r}")
    if value < minimum:
        raise ValueError(
            f"`{name}` must be at least {minimum:g}. Received: {name}={value!r}"
        )
