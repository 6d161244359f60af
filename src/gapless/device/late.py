"""First times: what a device does once and not again, and what of it happened after the engine was ready.

A kernel that is compiled, a module that is loaded, memory that is taken from the device, the first product of a shape:
each holds the host for some microseconds up to seconds, and the device waits. All of that belongs before the engine is
ready. After it, it is counted here with names. Knows no Triton and no library: they report, or are asked.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

PREFIX = "after ready: "
MOST_NAMES = 32  # of kernels, and of each kind that is watched: so many are counted by name
KEPT_NOTES = 32
ALLOCATED = "device allocation"


class Late:
    """The first times of one device. The thread that launches writes; any thread may read."""

    def __init__(self) -> None:
        self.where = ""  # what is being launched, such as "compute 17"
        self.num_kernels = 0  # compiled, found in the cache, or loaded: whoever watches sees that it has changed
        self.built: Counter[str] = Counter()  # kernels by how they were had, before the engine was ready
        self.notes: deque[str] = deque(maxlen=KEPT_NOTES)  # the last ones, each with its step
        self._counts: Counter[str] = Counter()
        self._is_ready = False
        self._lock = threading.Lock()  # of the counts: kernels are compiled by several threads
        self._names: dict[str, tuple[Sequence[str], int]] = {}  # by kind: all of them, and how many before
        self._allocations: Callable[[], int] | None = None
        self._allocated = self._noted = 0  # when the engine was ready, and when it was last looked at

    def watch_names(self, kind: str, names: Sequence[str]) -> None:
        """Look at `names`, which only grow at their end, for new ones."""
        self._names[kind] = (names, len(names))

    def watch_allocations(self, count: Callable[[], int]) -> None:
        """Have `count` asked how often memory was taken from the device so far."""
        self._allocations = count

    def ready(self) -> None:
        """From now on everything counts."""
        self._is_ready = True
        self._names = {kind: (names, len(names)) for kind, (names, _) in self._names.items()}
        if self._allocations is not None:
            self._allocated = self._noted = self._allocations()

    def compiled(self, name: str, seconds: float, *, cached: bool) -> None:
        """A kernel was compiled, or found in the cache of compiled ones."""
        self._add("found in the cache" if cached else "compiled", name, f", {seconds:.2f} s" if not cached else "")

    def loaded(self, name: str) -> None:
        """A kernel was loaded onto the device."""
        self._add("loaded", name)

    def note_allocations(self) -> bool:
        """Whether memory was taken since this was last asked; if so, note what is being launched."""
        count = self._allocations() if self._allocations is not None and self._is_ready else 0
        grown, self._noted = count > self._noted, max(count, self._noted)
        if grown:
            self._note(ALLOCATED)
        return grown

    def ledger(self) -> dict[str, int]:
        """How often each thing happened since the engine was ready."""
        if not self._is_ready:
            return {}
        with self._lock:
            found = dict(self._counts)
        for kind, (names, before) in self._names.items():
            found |= {f"{PREFIX}{kind} {name}": 1 for name in names[before : before + MOST_NAMES]}
            if (others := len(names) - before - MOST_NAMES) > 0:
                found[f"{PREFIX}{kind}, others"] = others
        if self._allocations is not None and (count := self._allocations() - self._allocated) > 0:
            found[f"{PREFIX}{ALLOCATED}"] = count
        return found

    def _add(self, verb: str, name: str, detail: str = "") -> None:
        with self._lock:
            self.num_kernels += 1
            if not self._is_ready:
                self.built[verb] += 1
                return
            key = f"{PREFIX}{verb} {name}"
            if key not in self._counts and len(self._counts) >= MOST_NAMES:
                key = f"{PREFIX}{verb}, others"
            self._counts[key] += 1
            self._note(f"{verb} {name}{detail}")

    def _note(self, what: str) -> None:
        self.notes.append(f"{self.where or 'outside a step'}: {what}")
