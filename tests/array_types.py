"""The run-time type check of the tests: beartype reads the signatures of the packages, jaxtyping the shapes in them."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
from beartype import BeartypeConf, beartype
from jax.typing import DTypeLike

# `Self` means nothing to a checker that sees one method at a time; a dtype is whatever jax takes for one. An int is
# a fine float, as the language has it.
READ_AS = {Self: Any, np.dtype: DTypeLike}
check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked[F: Callable[..., Any]](function: F) -> F:
    """`function`, with its arguments and result held against its annotations at every call.

    Constructors are let through: jax calls them with anything for a leaf when it rebuilds a pytree, one lane of a
    state for instance.
    """
    if function.__name__ == "__init__":
        return function
    hints = getattr(function, "__annotations__", {})
    for name, hint in hints.items():
        hints[name] = next((theirs for ours, theirs in READ_AS.items() if hint is ours), hint)
    return check(function)
