"""Plans drawn at random, of any content that the types allow, whether or not a scheduler would make them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from gapless.core.baggage import Owner, pack_baggage
from gapless.core.limits import Limits
from gapless.core.params import MAX_LOGPROBS, MAX_STOP_IDS, SamplingParams
from gapless.core.plan import Chunk, Plan
from gapless.core.request import Request, int_array
from gapless.core.row_fields import SEAT, SEAT_WORDS, write_seat

LIMITS = Limits(num_rows=6, num_blocks=30, block_size=4, max_batch_tokens=40, max_model_len=64, windows=(None, 9))
VOCAB = 61
FLOATS = {"width": 32, "allow_subnormal": False}


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        max_tokens=10,
        min_tokens=draw(st.integers(0, 10)),
        temperature=draw(st.floats(0, 100, **FLOATS)),
        top_k=draw(st.integers(0, 2**31 - 1)),
        top_p=draw(st.floats(0, 1, exclude_min=True, **FLOATS)),
        min_p=draw(st.floats(0, 1, **FLOATS)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5)),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    seed = draw(st.integers(-(2**63), 2**63 - 1))
    stop_ids = tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=MAX_STOP_IDS)))
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
    return Request("r", int_array(prompt), draw(sampling_params()), seed, stop_ids, limit=64)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    rows = draw(st.permutations(range(LIMITS.num_rows)))
    num_decodes = draw(st.integers(0, LIMITS.num_rows))
    decode_rows, others = rows[:num_decodes], rows[num_decodes:]
    chunks = [_chunk(draw, row) for row in others[: draw(st.integers(0, len(others)))]]
    sampling = [chunk.row for chunk in chunks if chunk.samples]
    seat_rows = [chunk.row for chunk in chunks if draw(st.booleans())]
    seats = np.zeros(len(seat_rows), SEAT)
    owners = []
    for index, row in enumerate(seat_rows):
        request = draw(requests())
        needs = write_seat(seats, index, request)
        tokens = np.array([*request.prompt, *draw(st.lists(st.integers(0, VOCAB - 1), max_size=9))], np.int32)
        owners.append(Owner(row, needs, tokens, request.num_prompt, request.params.logit_bias))
    keys = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 15)), unique=True, max_size=20))
    block = st.integers(0, LIMITS.num_blocks - 1)
    blocks = [(row, index, *(draw(block) for _ in LIMITS.windows)) for row, index in keys]
    return Plan(
        step=1,
        decode_rows=int_array(decode_rows),
        chunks=tuple(chunks),
        new_blocks=np.array(blocks, np.int32).reshape(-1, 2 + LIMITS.num_groups),
        sample_rows=int_array([*decode_rows, *sampling]),
        sample_epochs=np.zeros(num_decodes + len(sampling), np.int64),
        max_decode_length=0,
        seat_rows=int_array(seat_rows),
        seats=seats.view(np.int32).reshape(len(seat_rows), SEAT_WORDS),
        baggage=pack_baggage(owners),
        block_copies=np.array(draw(_copies()), np.int32).reshape(-1, 2),
        score_samples=int_array(sorted(draw(_subset(num_decodes + len(sampling))))),
        num_top=draw(st.integers(0, MAX_LOGPROBS)),
    )


def _copies() -> st.SearchStrategy[list[tuple[int, int]]]:
    blocks = st.integers(0, LIMITS.num_blocks // 2 - 1)
    return st.lists(st.tuples(blocks, blocks.map(lambda block: block + LIMITS.num_blocks // 2)), max_size=6)


def _subset(count: int) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(0, count - 1)) if count else st.just(set())


def _chunk(draw: st.DrawFn, row: int) -> Chunk:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6))
    start, samples = draw(st.integers(0, 50)), draw(st.booleans())
    scored_from = draw(st.integers(start, start + len(tokens)))
    room = start + len(tokens) - samples - scored_from
    targets = draw(st.lists(st.integers(0, 2**31 - 1), max_size=max(room, 0)))
    return Chunk(row, draw(st.integers(1, 9)), start, int_array(tokens), samples, int_array(targets), scored_from)
