"""Every exception that Gapless raises on purpose.

    GaplessError
    ├── InvalidRequest      a prompt or a sampling parameter that cannot be served (also a ValueError)
    │   ├── PromptTooLong       a prompt that is longer than the model's context
    │   ├── TemplateBusy        the chat template is slow, and too many other renderings of it are too
    │   └── CompilerBusy        a shape waited too long for others that are being compiled
    ├── ConfigError         an engine option that makes no sense, alone or together (also a ValueError)
    ├── ModelError          the model cannot be used
    │   ├── ModelNotFound       no such name, directory, file or hub id
    │   ├── UnsupportedModel    found, but of an architecture or feature that Gapless does not have
    │   └── CorruptModel        found, but damaged or incomplete
    ├── NoReplica           no replica accepts requests: none is running, or all are draining
    ├── ServerUnreachable   a server that was named by its URL does not answer, or not as one
    ├── OutputError         results cannot be written: a full disk, or a reader that has gone
    ├── CapacityError       not enough memory for what was asked
    ├── NativeUnavailable   no native step can be built here; the engine then runs steps in torch
    ├── RaceError           the happens-before checker found an unordered conflict
    ├── StepFailed          a step raised on the device; the requests in it failed, others go on
    ├── RankFailed          a tensor parallel rank died, raised, or did not answer in time; its group ends
    ├── ControlFailed       a guide or a logits processor raised; its own requests failed, others go on
    └── EngineClosed        used after close, or the engine died

A message names the value, the limit, and what to do. `assert` is for our own bugs and is not in this tree.
"""


class GaplessError(Exception):
    """Base of all errors raised on purpose."""


class InvalidRequest(GaplessError, ValueError):
    """A prompt or a sampling parameter that cannot be served; `param` names it, where it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    """A prompt that is longer than the model's context."""

    def __init__(self, most: int, given: str, advice: str = "") -> None:
        message = f"This model's maximum context length is {most} tokens. However, you requested {given}.{advice}"
        super().__init__(message, "prompt")


class TemplateBusy(InvalidRequest):
    """A slow rendering, stopped because too many others are slow at the same time."""


class CompilerBusy(InvalidRequest):
    """A shape that no thread took in time, because too many others are being compiled. It may be tried again."""


class ConfigError(GaplessError, ValueError):
    """An engine option that makes no sense, alone or with the others."""


class ModelError(GaplessError):
    """The model cannot be used."""


class ModelNotFound(ModelError):
    """No such model name, directory, file or hub id."""


class UnsupportedModel(ModelError):
    """The model was found, but Gapless lacks its architecture or one of its features."""


class CorruptModel(ModelError):
    """The model was found, but its files are damaged or incomplete."""


class NoReplica(GaplessError):
    """No replica accepts requests: none is running, or all are draining."""


class ServerUnreachable(GaplessError):
    """A server does not answer, or its answer is not that of an OpenAI endpoint."""


class OutputError(GaplessError):
    """Results cannot be written: the disk is full, or their reader has gone."""


class CapacityError(GaplessError):
    """Not enough memory for what was asked."""


class NativeUnavailable(GaplessError):
    """The native step cannot be built or loaded; engines catch this and say why they go on without."""


class RaceError(GaplessError):
    """Two accesses of one buffer are not ordered by any event."""


class StepFailed(GaplessError):
    """A step raised on the device."""


class RankFailed(GaplessError):
    """A tensor parallel rank died, raised, or did not answer in time. The ranks are out of step, so all of them end."""


class ControlFailed(GaplessError):
    """A guide or a logits processor raised."""


class EngineClosed(GaplessError):
    """The engine was used after it was closed, or it died."""
