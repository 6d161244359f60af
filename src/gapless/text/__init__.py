"""ids <-> text: the tokenizer, chat templates, incremental detokenization and stop strings.

Imports no torch. `load_tokenizer` is the entry point; the modules below it take plain values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gapless.models.source import ModelSource
    from gapless.text.tokenizer import Tokenizer


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer that comes with a model, from its GGUF metadata or its Hugging Face directory."""
    from gapless.text.tokenizer import Tokenizer

    if source.kind == "gguf":
        from gapless.models.gguf_file import GGUFFile

        return Tokenizer.from_gguf(GGUFFile(source.path).metadata)
    return Tokenizer.from_directory(source.path)
