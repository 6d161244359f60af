"""A lack of memory, recognized in the words of each library and raised as one error.

Does not know how much memory there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gapless.errors import CapacityError, GaplessError

_SIGNS = (
    "allocate memory",  # torch on a CPU, and the system's own words
    "not enough memory",
    "out of memory",  # torch on a GPU
    "bad_alloc",
    "can't start new thread",  # a thread needs a stack
    "maximum allowed dimension exceeded",  # numpy, for sizes past any address
    "storage size calculation overflowed",  # torch, for the same
)


def is_shortage(error: BaseException) -> bool:
    """Whether an error means that memory, or room for a thread, ran out."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError | ValueError) and any(sign in str(error).lower() for sign in _SIGNS)


@contextmanager
def shortage_named(what: str) -> Iterator[None]:
    """Errors that mean a lack of memory leave this as CapacityError; can decorate a function too."""
    try:
        yield
    except GaplessError:
        raise
    except Exception as error:
        if not is_shortage(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CapacityError(
            f"not enough memory for {what} ({reason}); lower kv_memory, max_num_rows or max_model_len, "
            "or choose a smaller model"
        ) from error
