"""Every endpoint of a real server, through the real `openai` client where it has a call for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import MAX_LEN, Server, eventually

from gapless import LLM, SamplingParams
from tiny import ALPHABET, CPU, ids

TALK = [{"role": "user", "content": "Hello"}]
RENDERED = "user: Hello|assistant:"  # by the tiny model's template
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def llm(long_dir: Path) -> Any:
    with LLM(long_dir, **CPU, depth=1, num_blocks=128) as llm:
        yield llm


def expected(llm: LLM, prompt: str, **params: Any) -> str:
    return str(llm.generate([prompt], SamplingParams(**params))[0].text)


# -- chat --------------------------------------------------------------------------------------------------------------


def test_chat(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model="tiny", messages=TALK, max_tokens=12, **GREEDY)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected(llm, RENDERED, max_tokens=12, temperature=0, ignore_eos=True)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(RENDERED), 12)


def test_chat_stream_has_the_shape_that_clients_depend_on(client: openai.OpenAI, llm: LLM) -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="alias", messages=TALK, max_completion_tokens=12, stream=True, stream_options=options, **GREEDY
    )
    chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert [choice.delta.role for choice in told] == ["assistant"] + [None] * (len(told) - 1)
    assert [choice.finish_reason for choice in told] == [None] * (len(told) - 1) + ["length"]
    text = "".join(choice.delta.content or "" for choice in told)
    assert text == expected(llm, RENDERED, max_tokens=12, temperature=0, ignore_eos=True)
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_a_stream_ends_with_done_and_has_no_usage_unasked(server: Server) -> None:
    body = {"messages": TALK, "max_tokens": 3, "stream": True}
    status, data = server.send("POST", "/v1/chat/completions", body)
    events = data.decode().split("\n\n")
    assert status == 200
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    assert not any("usage" in event for event in events)


def test_several_choices_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    calls = [
        client.chat.completions.create(model="tiny", messages=TALK, max_tokens=20, n=3, seed=7, temperature=1.5)
        for _ in range(2)
    ]
    first, second = ([choice.message.content for choice in call.choices] for call in calls)
    assert first == second
    assert len(set(first)) == 3
    assert [choice.index for choice in calls[0].choices] == [0, 1, 2]
    alone = client.chat.completions.create(model="tiny", messages=TALK, max_tokens=20, seed=7, temperature=1.5)
    assert alone.choices[0].message.content == first[0]
    usage = calls[0].usage
    assert usage is not None
    assert usage.prompt_tokens == len(RENDERED)


def test_streams_of_several_choices_do_not_mix(client: openai.OpenAI) -> None:
    question: dict[str, Any] = {"model": "tiny", "messages": TALK, "max_tokens": 20, "n": 3, "seed": 7}
    whole = client.chat.completions.create(**question)
    texts, reasons = {0: "", 1: "", 2: ""}, dict[int, list[str]]()
    for chunk in client.chat.completions.create(**question, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons.setdefault(choice.index, []).append(choice.finish_reason)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: [choice.finish_reason] for choice in whole.choices}


def test_content_parts_and_developer_messages(client: openai.OpenAI) -> None:
    parts: Any = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    plain: Any = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    answers = [
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, **GREEDY)
        for messages in (parts, plain)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=TALK, max_tokens=20, **GREEDY)
    text = whole.choices[0].message.content
    assert text
    for stream in (False, True):
        answer: Any = client.chat.completions.create(
            model="tiny", messages=TALK, max_tokens=20, stop=text[5:7], stream=stream, **GREEDY
        )
        if stream:
            choices = [chunk.choices[0] for chunk in answer]
            found = "".join(choice.delta.content or "" for choice in choices)
            assert choices[-1].finish_reason == "stop"
        else:
            found = answer.choices[0].message.content
            assert answer.choices[0].finish_reason == "stop"
        assert found == text[: text.index(text[5:7])]


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_stays_in_the_text_if_asked_for(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    """A stop string and a stop token, for chats and completions."""
    text = expected(llm, RENDERED, max_tokens=20, temperature=0, ignore_eos=True)
    end = text.index(text[5]) + 1
    for stop in ({"stop": text[5]}, {"stop_token_ids": ids(text[5])}):
        for include, shown in ((True, text[:end]), (False, text[: end - 1])):
            more = {"extra_body": {"ignore_eos": True, "include_stop_str_in_output": include} | stop}
            asked: Any = {"model": "tiny", "max_tokens": 20, "temperature": 0, "stream": stream} | more
            chat: Any = client.chat.completions.create(messages=TALK, **asked)
            told: Any = client.completions.create(prompt=RENDERED, **asked)
            chats = [part.choices[0] for part in (chat if stream else [chat])]
            texts = [part.choices[0] for part in (told if stream else [told])]
            said = [(part.delta if stream else part.message).content or "" for part in chats]
            assert "".join(said) == "".join(part.text for part in texts) == shown
            assert chats[-1].finish_reason == texts[-1].finish_reason == "stop"


def test_min_tokens_keeps_a_stop_string_away(client: openai.OpenAI, llm: LLM) -> None:
    text = expected(llm, RENDERED, max_tokens=20, temperature=0, ignore_eos=True)
    for least in (0, 4, 5, 6, 20):
        more = {"extra_body": {"ignore_eos": True, "min_tokens": least}}
        answer = client.completions.create(
            model="tiny", prompt=RENDERED, max_tokens=20, temperature=0, stop=text[4:6], **more
        )
        end = text.find(text[4:6], max(least - 1, 0))  # the first match that ends past the first `least` tokens
        assert answer.choices[0].text == (text if end < 0 else text[:end])


def test_the_best_of_several_are_those_with_the_highest_mean_logprob(client: openai.OpenAI, llm: LLM) -> None:
    """The candidates are those that `n` would return. The tokens of all of them count."""
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 1.5, "seed": 7}
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=7, n=4, logprobs=0)
    for prompts in (["Hello"], ["Hello", "abc"]):
        told, num_tokens = [], 0
        for prompt, completion in zip(prompts, llm.generate(prompts, params), strict=True):
            scores = {choice.text: [item.logprob for item in choice.logprobs or ()] for choice in completion.choices}
            ranked = sorted(scores, key=lambda text: -sum(scores[text]) / len(scores[text]))
            told += [prompt + text for text in ranked[:2]]
            num_tokens += sum(map(len, scores.values()))
        for logprobs in (None, 1):
            answer = client.completions.create(prompt=prompts, n=2, best_of=4, logprobs=logprobs, echo=True, **asked)
            assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(told))
            assert all((choice.logprobs is None) == (logprobs is None) for choice in answer.choices)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == num_tokens
    chat = client.chat.completions.create(messages=TALK, n=1, extra_body={"best_of": 4}, **asked)
    (found,) = llm.generate(RENDERED, SamplingParams(max_tokens=8, temperature=1.5, seed=7, best_of=4))
    assert [choice.message.content for choice in chat.choices] == [found.text]


def test_choices_are_the_same_as_offline(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=8, temperature=1.5, seed=7, n=3)
    (found,) = llm.generate("Hello", SamplingParams(max_tokens=8, temperature=1.5, seed=7, n=3))
    assert [choice.text for choice in answer.choices] == [choice.text for choice in found.choices]


def test_the_end_of_sequence_ends_an_answer(client: openai.OpenAI, llm: LLM) -> None:
    """With wide sampling the end token comes soon; the engine's own API says the same."""
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=900, seed=3, temperature=2.0)
    offline = llm.generate(["abc"], SamplingParams(max_tokens=900, seed=3, temperature=2.0))[0]
    assert answer.choices[0].finish_reason == offline.finish_reason == "stop"
    assert answer.choices[0].text == offline.text


# -- completions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["Hello", ids("Hello")], ids=["text", "ids"])
def test_completion(client: openai.OpenAI, llm: LLM, prompt: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, **GREEDY)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == expected(llm, "Hello", max_tokens=9, temperature=0, ignore_eos=True)
    echoed = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, echo=True, **GREEDY)
    assert echoed.choices[0].text == "Hello" + answer.choices[0].text


@pytest.mark.parametrize("prompt", [["Hello", "abc"], [ids("Hello"), ids("abc")]], ids=["texts", "ids"])
def test_a_list_of_prompts(client: openai.OpenAI, llm: LLM, prompt: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=5, n=2, **GREEDY)
    texts = [expected(llm, text, max_tokens=5, temperature=0, ignore_eos=True) for text in ("Hello", "abc")]
    assert [choice.text for choice in answer.choices] == [texts[0], texts[0], texts[1], texts[1]]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 8


def test_a_completion_streams(client: openai.OpenAI, llm: LLM) -> None:
    stream = client.completions.create(model="tiny", prompt="Hello", max_tokens=9, echo=True, stream=True, **GREEDY)
    chunks = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == "Hello" + expected(llm, "Hello", max_tokens=9, temperature=0, ignore_eos=True)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1


def test_no_tokens_at_all(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=0, echo=True)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


# -- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_likelihoods_as_evaluation_harnesses_read_them(server: Server, llm: LLM, max_tokens: int, stream: bool) -> None:
    """One entry for each prompt token, the first null; the texts of several prompts at once; cached prompts too."""
    prompts = [ids("The quick brown fox"), ids("a")]
    body = {"prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    for _ in range(2):
        _, data = server.send("POST", "/v1/completions", body | {"stream": stream})
        choices = _choices(data, stream)
        for choice, prompt in zip(choices, prompts, strict=True):
            found = choice["logprobs"]
            assert len(found["token_logprobs"]) == len(prompt) + max_tokens
            assert found["token_logprobs"][0] is None
            assert found["top_logprobs"][0] is None
            assert "".join(found["tokens"]) == choice["text"]
            assert found["text_offset"] == list(range(len(prompt) + max_tokens))
            params = SamplingParams(max_tokens=1, temperature=0, logprobs=2, prompt_logprobs=2)
            offline = llm.generate([prompt], params)[0]
            assert offline.prompt_logprobs is not None
            scores = [*offline.prompt_logprobs[1:], *(offline.logprobs or ())][: len(prompt) - 1 + max_tokens]
            assert found["token_logprobs"][1:] == pytest.approx([score.logprob for score in scores if score], abs=1e-4)
            for top, score in zip(found["top_logprobs"][1:], scores, strict=True):
                assert score is not None
                assert set(top) == {ALPHABET[token] for token, _ in score.top} | {ALPHABET[score.token]}


def _choices(data: bytes, stream: bool) -> list[dict[str, Any]]:
    """The choices of an answer; those of a stream put together from their pieces."""
    if not stream:
        return list(json.loads(data)["choices"])
    whole: dict[int, dict[str, Any]] = {}
    for line in data.decode().splitlines():
        if line.startswith("data: {"):
            (piece,) = json.loads(line[6:])["choices"]
            choice = whole.setdefault(piece["index"], {"text": "", "logprobs": {}})
            choice["text"] += piece["text"]
            for name, values in piece["logprobs"].items():
                choice["logprobs"].setdefault(name, []).extend(values)
    return [whole[index] for index in sorted(whole)]


def test_likelihoods_of_a_chat(client: openai.OpenAI, llm: LLM) -> None:
    question: dict[str, Any] = {"model": "tiny", "messages": TALK, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    offline = llm.generate([RENDERED], SamplingParams(max_tokens=6, temperature=0, logprobs=3, ignore_eos=True))[0]
    assert offline.logprobs is not None
    answer = client.chat.completions.create(**question, **GREEDY)
    assert answer.choices[0].logprobs is not None
    whole = answer.choices[0].logprobs.content or []
    streamed = []
    for chunk in client.chat.completions.create(**question, **GREEDY, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [item.token for item in streamed] == [item.token for item in whole] == list(offline.text)
    for item, score in zip(whole, offline.logprobs, strict=True):
        assert item.logprob == pytest.approx(score.logprob, abs=1e-4)
        assert item.bytes == list(item.token.encode())
        assert [top.token for top in item.top_logprobs] == [ALPHABET[token] for token, _ in score.top]
    bare = client.chat.completions.create(model="tiny", messages=TALK, max_tokens=2, logprobs=True)
    assert bare.choices[0].logprobs is not None
    assert [item.top_logprobs for item in bare.choices[0].logprobs.content or []] == [[], []]


# -- responses ---------------------------------------------------------------------------------------------------------


def test_response(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.responses.create(model="tiny", input="Hello", max_output_tokens=8, temperature=0)
    assert answer.output_text == expected(llm, RENDERED, max_tokens=8, temperature=0)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(RENDERED)


def test_a_response_streams_numbered_events(client: openai.OpenAI) -> None:
    question: dict[str, Any] = {"model": "tiny", "input": TALK, "max_output_tokens": 8, "temperature": 0}
    events = list(client.responses.create(**question, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert events[-1].type == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == client.responses.create(**question).output_text


def test_likelihoods_of_a_response(client: openai.OpenAI, llm: LLM) -> None:
    """Plain and streamed, in the delta events and at the end, where each token also has its bytes."""
    question: dict[str, Any] = {"model": "tiny", "input": "Hello", "max_output_tokens": 6, **GREEDY}
    question |= {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    offline = llm.generate([RENDERED], SamplingParams(max_tokens=6, temperature=0, logprobs=3, ignore_eos=True))[0]
    answer = client.responses.create(**question)
    assert answer.top_logprobs == 3
    whole = answer.output[0].content[0].logprobs
    for item, score in zip(whole, offline.logprobs or (), strict=True):
        assert item.token == ALPHABET[score.token]
        assert item.bytes == list(item.token.encode())
        assert item.logprob == pytest.approx(score.logprob, abs=1e-4)
        assert [top.token for top in item.top_logprobs] == [ALPHABET[token] for token, _ in score.top]
        assert all(top.bytes == list(top.token.encode()) for top in item.top_logprobs)
    events = list(client.responses.create(**question, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert "".join(event.delta for event in deltas) == answer.output_text
    for found in ([item for event in deltas for item in event.logprobs], done.logprobs):
        assert [(item.token, len(item.top_logprobs)) for item in found] == [(item.token, 3) for item in whole]
        assert [item.logprob for item in found] == pytest.approx([item.logprob for item in whole], abs=1e-4)
    last = events[-1].response.output[0].content[0].logprobs
    assert [(item.token, item.bytes) for item in last] == [(item.token, item.bytes) for item in whole]
    bare = client.responses.create(**question | {"top_logprobs": None, "max_output_tokens": 2})
    assert [item.top_logprobs for item in bare.output[0].content[0].logprobs] == [[], []]
    plain = client.responses.create(model="tiny", input="Hello", max_output_tokens=2)
    assert plain.output[0].content[0].logprobs == []


def test_a_response_goes_on_with_an_earlier_one(client: openai.OpenAI, llm: LLM) -> None:
    first = client.responses.create(model="tiny", input="Hello", max_output_tokens=5, instructions="Hm", temperature=0)
    second = client.responses.create(
        model="tiny", input="More", max_output_tokens=5, previous_response_id=first.id, temperature=0
    )
    talk = f"user: Hello|assistant: {first.output_text}|user: More|assistant:"  # instructions are not carried over
    assert second.output_text == expected(llm, talk, max_tokens=5, temperature=0)
    forgotten = client.responses.create(model="tiny", input="Hello", max_output_tokens=5, store=False)
    for id in (forgotten.id, "resp_nonsense"):
        with pytest.raises(openai.NotFoundError, match="not here"):
            client.responses.create(model="tiny", input="More", previous_response_id=id)


# -- text and operation ------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").owned_by == "gapless"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("no/such")


def test_tokenize_and_back(server: Server) -> None:
    status, data = server.send("POST", "/tokenize", {"prompt": "Hello"})
    assert (status, json.loads(data)) == (200, {"tokens": ids("Hello"), "count": 5, "max_model_len": MAX_LEN})
    status, data = server.send("POST", "/tokenize", {"messages": TALK})
    assert json.loads(data)["tokens"] == ids(RENDERED)
    status, data = server.send("POST", "/detokenize", {"tokens": ids("Hello")})
    assert (status, json.loads(data)) == (200, {"prompt": "Hello"})
    long = ALPHABET[1:] * 600  # past what is tokenized at once
    status, data = server.send("POST", "/tokenize", {"prompt": long})
    assert json.loads(data)["count"] == len(long)
    status, data = server.send("POST", "/detokenize", {"tokens": ids(long[:10_000])})
    assert json.loads(data) == {"prompt": long[:10_000]}


def test_operation(server: Server) -> None:
    assert server.get("/health") == (200, b'{"status":"ok"}')
    assert server.send("HEAD", "/health") == server.send("HEAD", "/ready") == (200, b"")  # what some balancers ask
    assert server.get("/ready") == (200, b'{"status":"ready"}')
    assert json.loads(server.get("/version")[1])["version"]
    assert b"<title>" in server.get("/")[1]
    assert b"<title>" in server.get("/docs")[1]
    paths = json.loads(server.get("/openapi.json")[1])["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/health"} <= set(paths)
    state = json.loads(server.get("/state")[1])
    assert state["status"] == "ready"
    assert state["model"] == "tiny"


def test_metrics_count(server: Server, client: openai.OpenAI) -> None:
    before = {name: server.metric(name) for name in ("gapless_requests_total", "gapless_generated_tokens_total")}
    client.completions.create(model="tiny", prompt="Hello", max_tokens=7, **GREEDY)
    least = before["gapless_generated_tokens_total"] + 7  # tokens of earlier tests may be told late too
    eventually(lambda: server.metric("gapless_generated_tokens_total") >= least, server)
    assert server.metric("gapless_requests_total") == before["gapless_requests_total"] + 1
    text = server.get("/metrics")[1].decode()
    for name in (
        "gapless_time_to_first_token_seconds_bucket",
        "gapless_time_per_output_token_seconds_bucket",
        "gapless_queue_seconds_bucket",
        "gapless_running_requests",
        "gapless_waiting_requests",
        "gapless_kv_use_ratio",
        "gapless_prefix_hit_tokens_total",
        "gapless_preemptions_total",
        "gapless_prompt_tokens_total",
        "gapless_wasted_tokens_total",
        "gapless_gpu_idle_seconds_total{cause=",
        "gapless_engine_restarts_total",
        'gapless_requests_total{outcome="length"}',
    ):
        assert name in text, name


def test_the_log_has_a_line_for_each_request(server: Server) -> None:
    request = server.send("GET", "/version", None, **{"X-Request-Id": "mine"})
    assert request[0] == 200
    lines = eventually(lambda: [line for line in server.lines() if line.get("client_request_id") == "mine"])
    assert lines[0]["path"] == "/version"
    assert lines[0]["status"] == 200
    assert lines[0]["request_id"].startswith("req_")


# -- what a request may ask to be told ---------------------------------------------------------------------------------


def ended(client: openai.OpenAI, **question: Any) -> tuple[dict[str, Any], Any]:
    """A chat that the end token ended before its limit, and what was asked."""
    for seed in range(50):
        asked: dict[str, Any] = {"model": "tiny", "messages": TALK, "seed": seed, "temperature": 2, **question}
        answer = client.chat.completions.create(**asked, max_tokens=200)
        if answer.choices[0].finish_reason == "stop":
            return asked | {"max_tokens": 200}, answer
    raise AssertionError("no chat ended by itself")


def test_the_end_token_is_not_among_the_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    """It counts as a token, but is no part of the content; with return_token_ids it is listed, as in token_ids."""
    asked, answer = ended(client, logprobs=True)
    streamed = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    pieces = [entry for choice in streamed if choice.logprobs for entry in choice.logprobs.content or []]
    for entries in (answer.choices[0].logprobs.content, pieces):
        assert bytes(byte for entry in entries for byte in entry.bytes).decode() == answer.choices[0].message.content
        assert len(entries) == answer.usage.completion_tokens - 1
    told = client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    entries = told.choices[0].logprobs.content
    assert len(entries) == len(told.choices[0].token_ids) == told.usage.completion_tokens
    assert (told.choices[0].token_ids[-1], entries[-1].bytes) == (0, [])
    assert told.prompt_token_ids == ids(RENDERED)


def test_the_end_token_is_not_among_the_log_probabilities_of_a_response(client: openai.OpenAI) -> None:
    question: dict[str, Any] = {"model": "tiny", "input": "Hello", "temperature": 2, "max_output_tokens": 200}
    question |= {"include": ["message.output_text.logprobs"]}
    answers = (client.responses.create(**question, extra_body={"seed": seed}) for seed in range(50))
    answer = next(answer for answer in answers if answer.status == "completed")
    entries = answer.output[0].content[0].logprobs
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == answer.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_min_tokens_hold_stop_strings_back(server: Server, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    whole = json.loads(server.send("POST", "/v1/completions", body)[1])["choices"][0]["text"]
    body |= {"stop": whole[3], "min_tokens": 10, "stream": stream}
    (choice,) = _choices(server.send("POST", "/v1/completions", body)[1], stream)
    at = whole.find(whole[3], 10)
    assert choice["text"] == (whole if at < 0 else whole[:at])
    assert choice["logprobs"]["text_offset"] == list(range(len(choice["text"]) + (at >= 0)))


def test_log_probabilities_of_a_prompt(server: Server, llm: LLM) -> None:
    """As vLLM tells them: by token id; the first is null. More of them than an echo shows is no harm to it."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=3)
    offline = llm.generate(["Hello"], params)[0].prompt_logprobs
    assert offline is not None
    body = {"prompt": "Hello", "max_tokens": 1, "temperature": 0, "prompt_logprobs": 3, "echo": True, "logprobs": 1}
    (choice,) = json.loads(server.send("POST", "/v1/completions", body)[1])["choices"]
    assert choice["prompt_logprobs"][0] is None
    for told, score in zip(choice["prompt_logprobs"][1:], offline[1:], strict=True):
        assert score is not None
        assert set(told) == {str(score.token), *(str(token) for token, _ in score.top)}
        entry = told[str(score.token)]
        assert entry["logprob"] == pytest.approx(score.logprob, abs=1e-4)
        assert (entry["rank"], entry["decoded_token"]) == (score.rank, ALPHABET[score.token])
    assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
    body = {"messages": TALK, "max_tokens": 1, "prompt_logprobs": 0}
    chat = json.loads(server.send("POST", "/v1/chat/completions", body)[1])
    assert [list(entry) for entry in chat["prompt_logprobs"][1:]] == [[str(token)] for token in ids(RENDERED)[1:]]


def test_a_chat_without_the_generation_prompt(server: Server, llm: LLM) -> None:
    body = {"messages": TALK, "max_tokens": 8, "temperature": 0, "add_generation_prompt": False}
    answer = json.loads(server.send("POST", "/v1/chat/completions", body)[1])
    prompt = RENDERED.removesuffix("assistant:")
    assert answer["choices"][0]["message"]["content"] == expected(llm, prompt, max_tokens=8, temperature=0)
