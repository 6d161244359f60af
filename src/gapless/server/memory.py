"""Responses that clients may read again or go on from, by id. Bounded in number and size: the oldest are forgotten."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from gapless.server.conversation import Talk
from gapless.server.errors import ApiError
from gapless.text.conversation import strings

MAX_KEPT = 1000
MAX_KEPT_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Kept:
    """A response, and the conversation that it ends."""

    talk: Talk
    response: bytes  # as JSON

    @property
    def size(self) -> int:
        return len(self.response) + sum(map(len, strings(self.talk)))


class Memory:
    """The last responses."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._num_bytes = 0

    def recall(self, id: str) -> Talk:
        """The conversation up to a response. Raises ApiError."""
        if id not in self._kept:
            message = f"previous response {id!r} is not here (any more)"
            raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
        self._kept.move_to_end(id)
        return self._kept[id].talk

    def read(self, id: str) -> bytes:
        """A response as JSON. Raises ApiError."""
        return self._find(id).response

    def keep(self, id: str, kept: Kept) -> None:
        self._kept[id] = kept
        self._num_bytes += kept.size
        while len(self._kept) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES:
            self._num_bytes -= self._kept.popitem(last=False)[1].size

    def forget(self, id: str) -> None:
        """Raises ApiError for one that is not here."""
        self._num_bytes -= self._find(id).size
        del self._kept[id]

    def _find(self, id: str) -> Kept:
        if id not in self._kept:
            raise ApiError(404, f"response {id!r} is not here (any more)", param="response_id", code="not_found")
        return self._kept[id]
