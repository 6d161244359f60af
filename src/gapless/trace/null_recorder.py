"""The recorder of an engine that records nothing. The loop and the executor tell it everything all the same."""

from __future__ import annotations

from gapless.trace.recorder import Recorder


class NullRecorder(Recorder):
    """Stands where nothing is recorded: whatever it is told is forgotten, and every reading of it is empty."""

    is_timed = False

    def __init__(self) -> None:
        super().__init__(kept_steps=0)
        self.close()

    def mark(self, phase: int) -> None:
        pass

    def woken(self) -> None:
        pass

    def dry(self, reason: int, name: str) -> None:
        pass

    def failed(self) -> None:
        pass

    def launched(self, step: int, num_rows: int, num_tokens: int, num_blocks: int) -> None:
        pass

    def collected(self, times: tuple[float, ...]) -> None:
        pass

    def start(self) -> None:
        pass


UNRECORDED = NullRecorder()
