"""Parts of the server that need no server process: who may run after a crash, templates, logs, metrics, frames."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from gapless import LLM
from gapless.config import EngineOptions
from gapless.core.outcome import TokenLogprob
from gapless.core.params import SamplingParams
from gapless.errors import ConfigError, InvalidRequest
from gapless.server.app import _caller
from gapless.server.channel import ChildChannel, Disconnected
from gapless.server.chat import answer_chat
from gapless.server.completions import CompletionAnswer
from gapless.server.engine_child import count_oom_kills
from gapless.server.engine_readings import read_timeline
from gapless.server.errors import dump, dump_early
from gapless.server.gate import CLIENT
from gapless.server.generation import Choice, Generation
from gapless.server.logprobs import TokenTexts, tell_completion_logprobs, tell_logprobs
from gapless.server.logs import MAX_QUEUED, LineWriter
from gapless.server.memory import MAX_KEPT, Kept, Memory
from gapless.server.messages import (
    EnginePulse,
    FromEngine,
    News,
    Over,
    SubmitFlight,
    ToEngine,
    pack_scores,
    pack_tokens,
)
from gapless.server.options import ServerOptions, read_keys
from gapless.server.protocol import ChatRequest, CompletionRequest
from gapless.server.protocol import MessageBody as ChatMessage
from gapless.server.roster import Flight, Roster
from gapless.server.service import Caller
from gapless.server.supervisor import Supervisor
from gapless.server.totals import EngineTotals
from gapless.server.traces import Traces
from gapless.text.transcript import Transcript
from tiny import ALPHABET

# -- the roster --------------------------------------------------------------------------------------------------------


NUM_PROOFS = 4  # tokens that clear a suspect, at depth 2


def roster_of(count: int) -> tuple[Roster, list[Flight]]:
    roster = Roster()
    flights = [Flight(i, [1, 2], SamplingParams(seed=i), asyncio.Event()) for i in range(count)]
    for flight in flights:
        roster.add(flight)
    return roster, flights


def run(roster: Roster) -> list[int]:
    """Send whom is due, and let them start."""
    due = [flight.id for flight in roster.due()]
    for id in due:
        roster.start(id)
    return due


def prove(roster: Roster, id: int) -> None:
    """Tokens that clear a suspect; if others are to be tried, it is called back."""
    for token in range(NUM_PROOFS):
        assert roster.due_back() is None
        assert run(roster) == []  # nobody else while one is on trial
        roster.take_token(id, token)
    if (flight := roster.due_back()) is not None:
        assert flight.id == id
        assert roster.take_back(Over(id, "abort"))


def test_after_a_kill_everybody_goes_on() -> None:
    roster, _ = roster_of(3)
    assert run(roster) == [0, 1, 2]
    roster.take_token(1, 7)
    assert roster.crash((), from_outside=True) == []
    assert run(roster) == [0, 1, 2]


def test_tokens_between_kills_clear_everybody() -> None:
    roster, flights = roster_of(2)
    for number in range(20):
        assert run(roster) == [0, 1]
        for flight in flights:
            roster.take_token(flight.id, number)
        assert roster.crash((), from_outside=True) == []
        assert not roster.in_quarantine


def test_suspects_run_one_at_a_time_and_the_second_crash_names_one() -> None:
    roster, flights = roster_of(5)
    assert run(roster) == [0, 1, 2, 3, 4]
    roster.take_token(0, 5)
    assert roster.crash(()) == []
    assert run(roster) == [4]  # the latest first
    prove(roster, 4)
    assert run(roster) == [3]  # and 4 waits again: whoever is on trial is alone
    roster.end(Over(3, "stop"))
    assert run(roster) == [2]
    assert roster.crash(()) == [flights[2]]
    roster.end(Over(2, "refused"))
    assert run(roster) == [0, 1, 4]  # cleared: the culprit was found
    assert not roster.in_quarantine


def test_when_all_were_heard_everybody_goes_on() -> None:
    roster, _ = roster_of(3)
    run(roster)
    roster.crash(())
    roster.add(Flight(3, [1], SamplingParams(), asyncio.Event()))
    for id in (2, 1, 0):
        assert run(roster) == [id]
        prove(roster, id)
        roster.check()
    assert run(roster) == [1, 2, 3]  # beside 0, the last one, which stayed
    assert not roster.in_quarantine


def test_a_few_tokens_do_not_hide_a_culprit() -> None:
    """What was in flight in a crash is made again before the place of the crash comes."""
    roster, flights = roster_of(2)
    run(roster)
    roster.take_token(1, 5)
    roster.crash(())
    assert run(roster) == [1]
    roster.take_token(1, 6)
    assert roster.crash(()) == [flights[1]]


def test_who_runs_alone_is_refused_at_the_second_crash() -> None:
    roster, flights = roster_of(1)
    run(roster)
    assert roster.crash(()) == []
    run(roster)
    assert roster.crash(()) == flights


def test_a_kill_during_a_trial_is_not_held_against_who_is_tried() -> None:
    roster, flights = roster_of(2)
    run(roster)
    roster.crash(())
    for _ in range(3):
        assert run(roster) == [1]
        assert roster.crash((), from_outside=True) == []
    assert run(roster) == [1]
    assert roster.crash(()) == [flights[1]]


def test_kills_from_outside_take_longer_to_be_held_against_anybody() -> None:
    roster, flights = roster_of(1)
    for _ in range(3):
        assert run(roster) == [0]
        assert roster.crash((), from_outside=True) == []
    assert run(roster) == [0]
    assert roster.crash((), from_outside=True) == flights


def test_those_who_only_waited_are_no_suspects() -> None:
    roster, flights = roster_of(3)
    for _ in range(2):
        roster.due()
        roster.start(0)
        found = roster.crash(())
    assert found == [flights[0]]
    assert [flight.id for flight in roster.due()] == [0, 1, 2]


def test_an_engine_that_knows_whose_step_failed_is_believed() -> None:
    roster, flights = roster_of(3)
    run(roster)
    assert roster.crash([1]) == []
    assert run(roster) == [1]
    assert roster.crash([1]) == [flights[1]]


def test_cached_tokens_are_those_of_the_first_time() -> None:
    """Who is called back finds its own blocks when it comes again: those are not its prompt's hits."""
    roster, flights = roster_of(2)
    run(roster)
    roster.crash(())
    run(roster)
    prove(roster, 1)
    roster.end(Over(1, "stop", num_cached=64))
    assert flights[1].num_cached == 0


def test_kills_for_lack_of_memory_are_told_from_others(tmp_path: Path) -> None:
    assert count_oom_kills(tmp_path / "none") == 0
    (tmp_path / "vmstat").write_text("pgfault 9\noom_kill 3\nzswpin 0\n")
    assert count_oom_kills(tmp_path / "vmstat") == 3


def test_a_late_token_or_end_of_a_flight_that_left_is_ignored() -> None:
    roster, flights = roster_of(1)
    run(roster)
    roster.end(Over(0, "abort"))
    assert roster.take_token(0, 1) is None
    assert roster.end(Over(0, "stop")) is None
    assert flights[0].over == Over(0, "abort")
    assert len(roster) == 0


@given(st.data())
def test_whatever_happens_nobody_is_lost(data: st.DataObject) -> None:
    """Any order of arrivals, starts, tokens, ends and crashes, poison among them; in the end only poison is refused,
    after two crashes each at most."""
    roster, flights, refused = Roster(), dict[int, Flight](), set[int]()
    poison = data.draw(st.sets(st.integers(0, 9), max_size=2), label="poison")
    num_crashes = 0

    def crash(blamed: list[int], from_outside: bool) -> None:
        for flight in roster.crash(blamed, from_outside=from_outside):
            refused.add(flight.id)
            roster.end(Over(flight.id, "refused"))

    def step() -> None:
        """One step of an engine that poison takes down, and that gives everybody else a token."""
        nonlocal num_crashes
        for flight in roster.due():
            roster.start(flight.id)
        running = [flight.id for flight in roster if flight.started]
        if poison.intersection(running):
            num_crashes += 1
            crash(running if data.draw(st.booleans()) else [], False)
            return
        for id in running:
            roster.take_token(id, 1)
        if (heard := roster.due_back()) is not None and data.draw(st.booleans()):
            roster.take_token(heard.id, 2)  # was in flight
        if heard is not None:
            assert roster.take_back(Over(heard.id, "abort"))

    for _ in range(data.draw(st.integers(0, 30), label="events")):
        match data.draw(st.sampled_from(("add", "step", "end", "kill"))):
            case "add" if len(flights) < 10:
                flights[len(flights)] = Flight(len(flights), [1], SamplingParams(), asyncio.Event())
                roster.add(flights[len(flights) - 1])
            case "end" if len(roster):
                roster.end(Over(data.draw(st.sampled_from([flight.id for flight in roster])), "abort"))
            case "kill":
                crash([], True)
            case _:
                step()
        roster.check()
    for _ in range(100):
        step()
        roster.check()
    left = {flight.id for flight in roster}
    assert refused <= poison, "an innocent was refused"
    assert num_crashes <= 2 * len(poison), "two crashes did not suffice"
    assert not poison & left, "poison still runs, or waits for ever"
    assert all(flights[id].tokens for id in left), "somebody waits for ever"


# -- logs --------------------------------------------------------------------------------------------------------------


def record(text: str, **extra: object) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": text, "levelno": logging.INFO, "levelname": "INFO", "name": "x", **extra})


def test_a_log_line_is_json(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = LineWriter(os.open(path, os.O_WRONLY | os.O_CREAT))
    writer.emit(record("hello\n\ud800", request_id="r1"))
    writer.close()
    line = json.loads(path.read_text())
    assert (line["message"], line["level"], line["request_id"]) == ("hello\n\ud800", "info", "r1")


def test_a_reader_that_stalls_or_leaves_stops_nobody() -> None:
    lost = threading.Semaphore(0)
    read_fd, write_fd = os.pipe()
    writer = LineWriter(write_fd, lost.release)
    for _ in range(MAX_QUEUED + 3000):  # nobody reads: pipe and queue fill up, and then lines are dropped
        writer.emit(record("x" * 100))
    assert lost.acquire(timeout=10)
    os.close(read_fd)
    writer.emit(record("to a broken pipe"))
    writer.close()
    assert lost.acquire(timeout=10)


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_frames_survive_the_wire_and_a_death_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    sender: ChildChannel[FromEngine] = ChildChannel(ours.detach(), FromEngine)
    receiver: ChildChannel[FromEngine | ToEngine] = ChildChannel(theirs.detach(), FromEngine | ToEngine)
    params = SamplingParams(max_tokens=3, stop_token_ids=(4,), seed=-5)
    sent = [News([1, 2], [3, 4], [Over(1, "stop")]), SubmitFlight(9, pack_tokens([1, 70000]), b"", params)]
    for message in sent:
        sender.send(message)
        assert receiver.receive() == message
    sender._socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(Disconnected):
        receiver.receive()


def test_traces_are_made_only_where_they_can_go(caplog: pytest.LogCaptureFixture) -> None:
    scope = {"method": "GET", "path": "/"}
    with Traces(None).span(scope, "r") as span:
        assert span is None
    if importlib.util.find_spec("opentelemetry.exporter") is not None:
        pytest.skip("the packages are here; without an endpoint to send to there is nothing to see")
    with Traces("http://127.0.0.1:1").span(scope, "r") as span:
        assert span is None
    assert "pip install 'gapless[otel]'" in caplog.text


def test_a_span_belongs_to_the_trace_of_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the part of OpenTelemetry that schemathesis brings; the rest is stood in for."""
    trace = pytest.importorskip("opentelemetry.trace")
    begun: list[tuple[Any, ...]] = []

    class Tracer:
        def start_as_current_span(self, *given: Any) -> contextlib.nullcontext[None]:
            begun.append(given)
            return contextlib.nullcontext()

    class Provider:
        def get_tracer(self, name: str) -> Tracer:
            return Tracer()

    monkeypatch.setattr("gapless.server.traces._provider", Provider)
    traces = Traces("http://127.0.0.1:1")
    number, scope = 0x0AF7651916CD43DD8448EB211C80319C, {"method": "POST", "path": "/v1/completions"}
    for headers in ([(b"traceparent", f"00-{number:032x}-b7ad6b7169203331-01".encode())], [(b"traceparent", b"\xff")]):
        with traces.span({**scope, "headers": headers}, "req_1"):
            pass
    parents = [trace.get_current_span(context).get_span_context().trace_id for _, context, _, _ in begun]
    assert parents == [number, 0]
    assert begun[0][0] == "POST /v1/completions"
    assert begun[0][2] is trace.SpanKind.SERVER
    assert begun[0][3]["gapless.request_id"] == "req_1"


def test_a_timeline_is_told_in_seconds_before_now() -> None:
    class Recording:
        def timeline_tail(self, seconds: float) -> dict[str, Any]:
            steps = [[-i - 0.5, -i, f"step {i}", i] for i in range(35, 0, -1)]
            return {"seconds": seconds / 2, "cpu": [], "h2d": [], "gpu": steps, "d2h": []}

    seconds, found = read_timeline(Recording(), 2.0)  # type: ignore[arg-type]
    assert seconds == 1.0
    assert list(found) == ["cpu", "h2d", "gpu", "d2h"]
    assert found["gpu"][-1] == (1.5, 1, "step 1")


def test_totals_go_on_when_an_engine_dies() -> None:
    totals = EngineTotals()

    def pulse(steps: float, busy_s: float, elapsed_s: float) -> EnginePulse:
        stats = {"num_steps": steps, "busy_s": busy_s}
        return EnginePulse(
            1, False, 0, 0, 0, 2, elapsed_s, stats, {"no graph": 2}, {"nothing to run": elapsed_s - busy_s}
        )

    totals.observe(pulse(10, 1.0, 4.0))
    totals.engine_died()
    assert totals.get("stats", "num_steps") == 10
    totals.observe(pulse(5, 0.5, 1.0))
    assert totals.get("stats", "num_steps") == 15
    assert totals.get("ledger", "no graph") == 4
    assert totals.get("idle", "nothing to run") == 3.5
    assert totals.names("ledger") == ["no graph"]


def test_keys_come_from_flags_file_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a\n\n b \n")
    assert read_keys(ServerOptions(api_key=("x",), api_key_file=str(path)), "env") == ("x", "a", "b", "env")
    assert read_keys(ServerOptions(), None) == ()
    path.write_text("\n")
    with pytest.raises(ConfigError, match="none is given"):
        read_keys(ServerOptions(api_key_file=str(path)), None)


@pytest.mark.parametrize(
    "wrong",
    [{"max_stop": 17}, {"max_logprobs": 21}, {"served_model_name": ("a", "")}, {"max_queue": -1}, {"port": 65536}],
    ids=str,
)
def test_an_option_that_could_not_be_kept_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerOptions(**wrong)


def test_memory_is_bounded() -> None:
    memory = Memory()
    for number in range(MAX_KEPT + 5):
        memory.keep(str(number), Kept([{"role": "user", "content": "x"}], b"{}"))
    assert memory.recall("5")
    with pytest.raises(Exception, match="not here"):
        memory.recall("4")
    for number in range(5):
        memory.keep(f"big {number}", Kept([{"role": "user", "content": "x" * 10 * 2**20}], b"x" * 10 * 2**20))
    with pytest.raises(Exception, match="not here"):
        memory.recall("big 1")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org"])
def test_loopback(host: str) -> None:
    assert ServerOptions(host=host).is_loopback is (host in ("127.0.0.1", "::1", "localhost"))


def test_others_have_their_turn_between_the_choices_of_a_long_answer() -> None:
    async def go() -> int:
        changed = asyncio.Event()
        flights = [Flight(i, [1, 2], SamplingParams(seed=i), changed) for i in range(20)]
        for flight in flights:
            flight.over = Over(flight.id, "length")
        choices = [Choice(flight.id, flight, Transcript(None, ())) for flight in flights]
        changed.set()
        generation = Generation(Supervisor(EngineOptions()), choices, changed, asyncio.get_running_loop().time() + 60)
        body = CompletionRequest(prompt=[1, 2], logprobs=1)
        answer = asyncio.create_task(CompletionAnswer(generation, body, "tiny", (), TokenTexts(None)).whole())
        num_turns = 0
        while not answer.done():
            await asyncio.sleep(0)
            num_turns += 1
        assert len((await answer)["choices"]) == 20
        return num_turns

    assert asyncio.run(go()) > 20


def test_others_have_their_turn_while_many_log_probabilities_are_told() -> None:
    """Of one long prompt, packed as the engine does, and of a long chat."""
    scores = [TokenLogprob(token % 97, -1.0, 1, ((1, -1.0), (2, -2.0))) for token in range(1000)]
    packed = [pack_scores([None, *scores[1:64]]), *(pack_scores(scores[i : i + 64]) for i in range(64, 1000, 64))]

    async def turns(work: Coroutine[Any, Any, Any]) -> tuple[Any, int]:
        task, num_turns = asyncio.create_task(work), 0
        while not task.done():
            await asyncio.sleep(0)
            num_turns += 1
        return task.result(), num_turns

    async def go() -> None:
        texts, tokens = TokenTexts(None), [score.token for score in scores]
        told, num_turns = await turns(tell_completion_logprobs(texts, tokens, packed, [0] * len(tokens), 2))
        assert told["tokens"] == [f"token_id:{token}" for token in tokens]
        assert told["token_logprobs"] == [None] + [-1.0] * 999
        assert num_turns >= 15
        entries, num_turns = await turns(tell_logprobs(texts, [pack_scores([score]) for score in scores]))
        assert [entry["token"] for entry in entries] == told["tokens"]
        assert num_turns >= 15

    asyncio.run(go())


def test_a_part_that_was_dumped_early_survives_what_json_cannot_encode() -> None:
    """A lone surrogate elsewhere in the answer makes the whole of it ASCII."""

    async def go() -> bytes:
        return dump({"early": await dump_early({"a": ["é"]}), "metadata": "\ud800"})

    assert json.loads(asyncio.run(go())) == {"early": {"a": ["é"]}, "metadata": "\ud800"}


def test_a_long_text_is_tokenized_while_others_run(tiny_llm: LLM) -> None:
    """The event loop goes on while a thread tokenizes."""
    tokenizer = tiny_llm.tokenizer
    assert tokenizer is not None
    text = ALPHABET[1:] * 4000

    async def go() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        work = asyncio.create_task(asyncio.to_thread(tokenizer.encode, text))
        longest, last = 0.0, began
        while not work.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, loop.time() - last), loop.time()
        assert len(await work) == len(text)
        return longest, loop.time() - began

    longest, whole = asyncio.run(go())
    assert longest < whole / 2


@pytest.mark.parametrize(
    ("values", "passed"),
    [
        ({}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"add_generation_prompt": False, "continue_final_message": True}),
    ],
    ids=str,
)
def test_who_speaks_next_is_passed_on_to_the_template(values: dict[str, Any], passed: dict[str, Any]) -> None:
    asked: list[dict[str, Any]] = []

    class Obliging:
        """Agrees to whatever it is asked."""

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **options: None

    class FakePrompts(Obliging):
        """Knows what it was asked to encode, and goes no further."""

        def template_values(self, given: Any, param: str) -> dict[str, Any]:
            return {}

        async def encode_chat(self, messages: Any, *, tools: Any, **options: Any) -> list[int]:
            asked.append(options)
            raise InvalidRequest("enough")

    class FakeService(Obliging):
        prompts = FakePrompts()

    body = ChatRequest(messages=[ChatMessage(role="user", content="Hello")], **values)
    with pytest.raises(InvalidRequest, match="enough"):
        asyncio.run(answer_chat(FakeService(), body, Caller("me")))  # type: ignore[arg-type]
    assert asked == [passed | {"values": {}}]


def test_a_session_is_known_by_its_client_and_its_header() -> None:
    def caller(client: str, *headers: tuple[bytes, bytes]) -> Caller:
        return _caller(Request({"type": "http", "headers": list(headers), CLIENT: client}))

    long = (b"x-session-id", b"s" * 10_000)
    assert caller("me") == Caller("me")
    assert caller("me", long) == caller("me", long)
    assert len({caller("me", long), caller("you", long), caller("me", (b"x-session-id", b"t"))}) == 3
    assert len(caller("me", long).session or "") == 32
