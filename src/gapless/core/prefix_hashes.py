"""Names for the prefixes of a prompt: a hash for each full block, which includes all tokens before it.

The same in every process and on every machine, so replicas, routers and files may speak of prefixes without their
tokens. For estimates only: the cache itself compares tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HASH_BYTES = 8
TOKEN_BYTES = 4


def prefix_hashes(tokens: Sequence[int] | npt.NDArray[np.int32], block_tokens: int) -> list[bytes]:
    """A hash for each full block of the tokens."""
    content = np.asarray(tokens, np.int32).tobytes()
    size = TOKEN_BYTES * block_tokens
    found: list[bytes] = []
    last = b""
    for start in range(0, len(content) - size + 1, size):
        last = hashlib.blake2b(last + content[start : start + size], digest_size=HASH_BYTES).digest()
        found.append(last)
    return found
