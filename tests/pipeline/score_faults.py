"""One thing wrong with log-probabilities, of generated tokens or of the prompt's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from fault import Table

import gapless.core.facts
import gapless.runner.fill
import gapless.runner.runner
import gapless.runner.step
from gapless.core.outcome import token_logprob
from gapless.core.plan import NOTHING, Plan, score_width
from gapless.core.prefix_sharing import PrefixSharing
from gapless.core.request import IntArray, Request
from gapless.core.scheduler import Scheduler
from gapless.core.scoring import Scoring
from gapless.runner.step import Targets

FAULTS = fault = Table()


@fault("log-probabilities are those of another row", gapless.runner.step, "score")
def _(original):
    return lambda logits, tokens, num_top: original(logits.roll(1, 0), tokens, num_top)


@fault("log-probabilities are those after the temperature", gapless.runner.step, "score")
def _(original):
    return lambda logits, tokens, num_top: original(logits / 0.9, tokens, num_top)


@fault("a prompt's log-probability is that of the token before", Scoring, "targets")
def _(original):
    def targets(self: Scoring, row: int, start: int, end: int) -> tuple[IntArray, int]:
        found, first = original(self, row, start, end)
        request = self._rows.request[row]
        return (request.prompt[first : first + len(found)], first) if request is not None else (found, first)

    return targets


@fault("a prompt's log-probability is lost where a chunk ends", Scoring, "targets")
def _(original):
    def targets(self: Scoring, row: int, start: int, end: int) -> tuple[IntArray, int]:
        found, first = original(self, row, start, end)
        return found[: end - 1 - first], first

    return targets


@fault("a prompt's log-probabilities are asked for again after a preemption", Scoring, "targets")
def _(original):
    def targets(self: Scoring, row: int, start: int, end: int) -> tuple[IntArray, int]:
        request = self._rows.request[row]
        if request is None or not request.lacks_prompt_scores:
            return NOTHING, 0
        return request.prompt[start + 1 : end + 1], start

    return targets


@fault("a prompt's log-probabilities begin behind what the cache holds", PrefixSharing, "match")
def _(original):
    def match(self: PrefixSharing, request: Request):
        if not self.enabled:
            return original(self, request)
        return self._pool.index.match(request.tokens, len(request.tokens) - 1)

    return match


@fault("a prompt's log-probabilities come from the place before", gapless.runner.fill, "target_parts")
def _(original):
    def parts(plan: Plan) -> list[IntArray]:
        places, targets = original(plan)
        return [np.maximum(places - 1, 0).astype(np.int32), targets]

    return parts


@fault("late log-probabilities are kept", Scoring, "keep")
def _(original):
    def keep(self: Scoring, plan: Plan, live, scores: IntArray) -> None:
        here = np.array([self._rows.request[row] is not None for row in plan.sample_rows.tolist()], bool)
        original(self, plan, here, scores)

    return keep


@fault("log-probabilities of an overrun move those behind it up", Scoring, "keep")
def _(original):
    def keep(self: Scoring, plan: Plan, live, scores: IntArray) -> None:
        kept = live[plan.score_samples]
        count = len(kept)
        moved = np.concatenate((scores[:count], scores[count:]))
        moved[:count][kept] = scores[: int(kept.sum())]
        original(self, plan, live, moved)

    return keep


@fault("late log-probabilities of a prompt are kept", Scoring, "keep")
def _(original):
    def keep(self: Scoring, plan: Plan, live, scores: IntArray) -> None:
        chunks = tuple(replace(chunk, epoch=int(self._rows.epoch[chunk.row])) for chunk in plan.chunks)
        original(self, replace(plan, chunks=chunks), live, scores)

    return keep


@fault("two prompts of a step exchange their log-probabilities", Scoring, "keep")
def _(original):
    def keep(self: Scoring, plan: Plan, live, scores: IntArray) -> None:
        count = len(plan.score_samples)
        original(self, plan, live, np.concatenate((scores[:count], scores[count:][::-1])))

    return keep


@fault("a request that steps back forgets its log-probabilities", Scheduler, "_step_back")
def _(original):
    def step_back(self: Scheduler, request: Request) -> None:
        original(self, request)
        request.prompt_scores.clear()

    return step_back


@fault("a step gives as many likeliest tokens as its first request wants", Scoring, "wanted")
def _(original):
    def wanted(self: Scoring, samples, chunks):
        found, most = original(self, samples, chunks)
        return found, min(most, max(0, int(self._rows.num_logprobs[samples[found[0]]]))) if len(found) else most

    return wanted


@fault("a stream has the log-probability of the token before", gapless.core.facts, "progress_of")
def _(original):
    def progress(request: Request, token: int):
        found = original(request, token)
        if found.logprob is None or len(request.scores) < 2:
            return found
        late = token_logprob(token, request.scores[-2], request.params.logprobs)
        return replace(found, logprob=late)

    return progress


@fault("a score is written where the next step's begins", gapless.runner.runner, "write_scores")
def _(original):
    def write_scores(out: torch.Tensor, num_top: int, logits, tokens, targets: Targets, by=None) -> None:
        original(out, num_top, logits, tokens, targets, by)
        scores, size = out.view(-1, score_width(num_top))[len(logits) :], targets.slice_size
        if len(scores) > size:
            scores[size:] = scores[: len(scores) - size].clone()

    return write_scores
