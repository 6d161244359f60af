"""What stands between the halves of a step: masks of guides, and calls of logits processors.

Gathers both for `complete`, and settles what came of them when the step is committed. Belongs to the loop's thread.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter

import numpy as np

from gapless.core.outcome import Commit, Finished
from gapless.core.plan import Plan
from gapless.core.processor import LogitsProcessor, RowFacts
from gapless.core.request import IntArray, Request
from gapless.core.scheduler import Scheduler
from gapless.errors import ControlFailed
from gapless.pipeline.executor import Executor, Ticket
from gapless.pipeline.masks import Masks
from gapless.runner.calls import Call
from gapless.trace.columns import MASKS
from gapless.trace.recorder import Recorder

log = logging.getLogger(__name__)


class Control:
    """Guides and processors of the scheduler's rows."""

    def __init__(self, scheduler: Scheduler, recorder: Recorder) -> None:
        self._scheduler = scheduler
        self._recorder = recorder
        self._masks = Masks(scheduler, recorder.ledger)

    def complete(self, executor: Executor, ticket: Ticket) -> tuple[Ticket, Commit]:
        """Have the second half of a step queued; also what followed from the masks as they were filled."""
        self._count(ticket.plan)
        complete = executor.complete(ticket, self._masks.fill, self._calls(ticket.plan))
        return complete, self._masks.settle()

    def commit(self, ticket: Ticket, results: IntArray) -> Commit:
        """Turn the results of a split step into facts, and tell the guides."""
        ended = [finished for call in ticket.calls for finished in self._settle(call)]
        commit = self._scheduler.commit(ticket.plan, results)
        self._recorder.mark(MASKS)
        learned = self._masks.learn(ticket.plan, commit)
        return Commit(learned.num_tokens, learned.progress, (*learned.finished, *ended))

    def _count(self, plan: Plan) -> None:
        ledger = self._recorder.ledger
        if len(plan.mask_samples):
            ledger["two halves: masks"] += 1
        if len(plan.process_samples):
            ledger["two halves: logits processors"] += 1
        if plan.waits:
            ledger["two halves: behind the step before"] += 1

    def _calls(self, plan: Plan) -> tuple[Call, ...]:
        """Each processor once, with all rows of the plan that are its own and whose owner has not left."""
        table, chosen = self._scheduler.rows, plan.process_samples
        rows = plan.sample_rows[chosen]
        live = table.epoch[rows] == plan.sample_epochs[chosen]
        wanted: dict[int, list[tuple[int, RowFacts]]] = defaultdict(list)  # by identity: any object will do
        chains: dict[tuple[int, ...], tuple[LogitsProcessor, ...]] = {}
        for sample, row in zip(chosen[live].tolist(), rows[live].tolist(), strict=True):
            request = table.request[row]
            assert request is not None
            facts = _facts(request, table.tokens[row, : table.num_tokens[row]])
            chains[tuple(map(id, request.processors))] = request.processors
            for processor in request.processors:
                wanted[id(processor)].append((sample, facts))
        return tuple(_call(processor, wanted[id(processor)]) for processor in in_order(chains.values()))

    def _settle(self, call: Call) -> list[Finished]:
        """Count a call; end its requests if it raised. Their samples are overruns then."""
        name, ledger = call.processor.name, self._recorder.ledger
        ledger[f"logits processor {name}: calls"] += 1
        ledger[f"logits processor {name}: µs"] += round(call.seconds * 1e6)
        if call.error is None:
            return []
        log.info("logits processor %s raised", name, exc_info=call.error)
        ledger[f"logits processor {name}: failures"] += 1
        kind, scheduler = type(call.error).__name__, self._scheduler
        failure = ControlFailed(f"logits processor {name} failed: {kind}: {call.error}")
        failure.__cause__ = call.error
        found = [scheduler.abort(facts.request_id, "error", failure) for facts in call.rows]
        return [finished for finished in found if finished is not None]  # of those that have not ended by themselves


def in_order(chains: Iterable[tuple[LogitsProcessor, ...]]) -> list[LogitsProcessor]:
    """The processors of several requests, each once, so that every request has its own in its order.

    Chains are parts of one order, that of the engine. Two processors that no request shares may come either way.
    """
    found: dict[int, LogitsProcessor] = {}
    before: dict[int, list[int]] = {}
    for chain in chains:
        found |= {id(processor): processor for processor in chain}
        for number, processor in enumerate(chain):
            before.setdefault(id(processor), []).extend(map(id, chain[max(number - 1, 0) : number]))
    return [found[key] for key in TopologicalSorter(before).static_order()]


def _call(processor: LogitsProcessor, pairs: Sequence[tuple[int, RowFacts]]) -> Call:
    samples, rows = zip(*pairs, strict=True)
    return Call(processor, np.array(samples, np.int64), rows)


def _facts(request: Request, tokens: IntArray) -> RowFacts:
    known = tokens.copy()  # the row may have another owner before the processor has read them
    known.flags.writeable = False
    return RowFacts(request.id, request.params, request.num_prompt, known)
