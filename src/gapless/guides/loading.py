"""Loads a model's vocabulary for grammars, when the first of them is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gapless.errors import GaplessError, InvalidRequest
from gapless.models.source import ModelSource
from gapless.text import load_tokenizer

if TYPE_CHECKING:
    from gapless.guides.vocabulary import Vocabulary


def load_vocabulary(source: ModelSource, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """The vocabulary of a model. Raises InvalidRequest where the model has no tokenizer that can be used."""
    from gapless.guides.vocabulary import Vocabulary

    try:
        return Vocabulary(load_tokenizer(source), vocab_size, eos_token_ids)
    except GaplessError as error:
        raise InvalidRequest(f"structured output needs the model's tokenizer: {error}", "structured") from error
