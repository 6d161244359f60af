"""`gapless chat` as a script uses it: messages from a pipe, answers on standard output."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless import LLM, Completion, SamplingParams
from gapless.chat.local import LocalPartner
from gapless.cli import main
from gapless.client import Delta, Prompt
from gapless.text.tools.base import Tool
from tiny import CPU, MAX_LEN, text_of, write_tiny

FLAGS = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--num-blocks", "64"]
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def chat(patch: Patch, tiny_dir: Path, text: str, *flags: str) -> int:
    patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    return main(["chat", "--model", str(tiny_dir), *FLAGS, *flags])


def test_answers_are_those_of_the_python_api(
    tiny_dir: Path, tiny_llm: LLM, monkeypatch: Patch, capsys: Captured
) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, stop=("!",))
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}]
    first = tiny_llm.chat(messages, params).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "b\nc"}]
    second = tiny_llm.chat(messages, params).text
    flags = ("--system", "S", "--temperature", "0", "--max-tokens", "9", "--stop", "!")
    assert chat(monkeypatch, tiny_dir, 'a\n"""b\nc"""\n', *flags) == 0
    captured = capsys.readouterr()
    assert captured.out.split("\n") == [*first.removesuffix("\n").split("\n"), *second.split("\n"), ""]
    assert "\x1b" not in captured.out + captured.err


def test_an_answer_may_fill_the_context_and_errors_are_counted(
    tiny_dir: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    path = tmp_path / "talk.json"
    text = f"/params ignore_eos=true\nhello\nmore\n/nonsense\n/save {path}\n"
    assert chat(monkeypatch, tiny_dir, text) == 1
    err = capsys.readouterr().err
    assert "cut: the answer reached" in err
    assert f"maximum context length is {MAX_LEN} tokens" in err
    assert "/undo takes the last exchange back" in err
    assert "unknown command /nonsense" in err
    assert len(json.loads(path.read_text())["messages"]) == 2
    assert chat(monkeypatch, tiny_dir, "/undo\nx\n", "--load", str(path), "--max-tokens", "2") == 0


def test_tools_and_reasoning_of_a_local_model(
    tiny_dir: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    """The tiny model writes nonsense, so its stream is replaced; prompts and the reading of replies are real."""
    prompts: list[str] = []
    texts = ['<think>hm</think>Wait.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "It is 2."]

    def stream(self: LLM, prompt: list[int], params: SamplingParams, *, shown_ids: object) -> Iterator[Delta]:
        prompts.append(text_of(prompt))
        text = texts.pop(0)
        yield from (Delta(char, (1,)) for char in text)
        yield Delta("", (), Completion(text, (1,) * len(text), "stop", tuple(prompt)))

    monkeypatch.setattr(LLM, "stream", stream)
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "add", "description": "D"}]')
    flags = ("--tools", str(tools), "--tool-format", "hermes", "--reasoning-format", "think", "--max-model-len", "2000")
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny(folder, max_position_embeddings=2000)
    assert chat(monkeypatch, folder, "1+1?\n2\n/tools\n", *flags) == 0
    captured = capsys.readouterr()
    assert captured.out == 'Wait.\n-> add {"a": 1}\nIt is 2.\n'
    assert captured.err.startswith("hm\n")
    assert "add: D" in captured.err
    assert '"name": "add", "description": "D"' in prompts[0]
    assert prompts[1].endswith('{"name": "add", "arguments": {"a": 1}}</tool_call>|user: Result of add:2|assistant:')


def test_shapes_of_a_local_model(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    """A template that opens the reasoning must not make the shape a part of it."""
    folder, tools = tmp_path / "model", tmp_path / "tools.json"
    folder.mkdir()
    write_tiny(folder, max_position_embeddings=1000)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{% if add_generation_prompt %}<think>{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert chat(monkeypatch, folder, "a\n", "--regex", "[ab]{4}", "--reasoning-format", "think") == 0
    assert re.fullmatch(r"[ab]{4}\n", capsys.readouterr().out)
    tools.write_text('[{"name": "f", "parameters": {"const": {"x": 1}}, "strict": true}]')
    flags = ("--tools", str(tools), "--tool-format", "json", "--reasoning-format", "none")
    assert chat(monkeypatch, folder, "a\n", *flags, "--regex", "a") == 1
    assert "structured and tools do not go together" in capsys.readouterr().err


def test_strict_tools_are_enforced_by_a_shape(tiny_dir: Path) -> None:
    params: list[SamplingParams] = []

    class Recorder(LLM):
        def stream(self, prompt: Prompt, chosen: SamplingParams | None = None, **options: object) -> Iterator[Delta]:
            assert chosen is not None
            params.append(chosen)
            return iter(())

    with Recorder(tiny_dir, **CPU, num_blocks=64, max_model_len=100) as llm:
        partner = LocalPartner(llm, "tiny", tool_format="hermes")
        messages = [{"role": "user", "content": "a"}]
        for strict in (False, True):
            tool = Tool("f", {"type": "object", "required": ["x"]}, strict=strict)
            list(partner.answer(messages, {"max_tokens": 5}, [tool]))
    assert params[0].structured is None
    assert params[1].structured is not None
    assert params[1].structured.kind == "structural_tag"
    assert '"required"' in params[1].structured.text


def test_a_model_that_cannot_chat_says_so(tiny_dir: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(tiny_dir / name)
    assert chat(monkeypatch, tmp_path, "a\n") == 2
    assert "has no chat template, so it cannot chat" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--url", "http://127.0.0.1:1", "--depth", "2"], "--depth is for a local model"),
        (["--url", "http://127.0.0.1:1", "--model", "x"], "--served-model names the server's"),
        (["--url", "http://127.0.0.1:1"], "Connection refused"),
        (["--url", "nowhere"], "--url must be like http://127.0.0.1:8000"),
        (["--api-key", "x"], "--api-key needs --url"),
        (["--load", "no/such/file"], "no such file"),
        (["--temperature", "-1"], "temperature"),
        (["--tools", "no/such/file"], "No such file"),
        (["--tool-format", "xml"], "tool_format must be one of auto, "),
        (["--url", "http://127.0.0.1:1", "--tool-format", "json"], "--tool-format is for a local model"),
    ],
)
def test_wrong_flags_are_one_clear_line(flags: list[str], words: str, capsys: Captured) -> None:
    assert main(["chat", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("gapless: ")
    assert error.count("\n") == 1
