"""The parts of a tokenizer, from any kind of file.

Knows only names and types. Readers (`hf_tokenizer`, `gguf_tokenizer`) fill it once. `Tokenizer` holds it, and nothing
writes it afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from gapless.errors import CorruptModel

MAX_TEMPLATE_LENGTH = 2**18  # characters; this many take seconds to compile


@dataclass(frozen=True)
class TokenizerParts:
    backend: Backend
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = None
    clean_up_spaces: bool = False

    def __post_init__(self) -> None:
        if self.chat_template is not None and len(self.chat_template) > MAX_TEMPLATE_LENGTH:
            raise CorruptModel(
                f"the chat template has {len(self.chat_template)} characters; at most {MAX_TEMPLATE_LENGTH} are read"
            )


def bos_eos_processor(backend: Backend, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    """The post-processor that puts `bos` before and `eos` after every text; None leaves that side bare."""
    single = " ".join(part for part in (bos, "$A", eos) if part is not None)
    specials = [(token, backend.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
    try:
        return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=specials)
    except ValueError as error:  # a token may look like a placeholder
        raise CorruptModel(f"bos {bos!r} and eos {eos!r} cannot be put around a text: {error}") from error
