"""Chat templates render as transformers renders them, and refuse what they cannot render."""

from __future__ import annotations

from typing import Any

import pytest

from gapless.errors import CorruptModel, InvalidRequest
from gapless.text.chat import ChatTemplate
from gapless.text.tokenizer import Tokenizer

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>&\"'\n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]
TEMPLATES = [
    "{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m.content | trim }}]\n    {% endif %}\n{% endfor %}",
    "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}{{ eos_token }}",
    "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}{{ missing }}",
    "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}{{ x }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ tools }}",
    "{{ strftime_now('%Y') }}{{ messages[-1]['content'][::-1] }}{{ pad_token }}{{ think }}",
]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_equals_transformers(template: str, messages: list[dict[str, Any]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    expected, _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>", think=True
    )
    assert ChatTemplate(template, bos_token="<s>", eos_token="</s>").render(messages, think=True) == expected[0]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_smollm2_template(smollm2: Tokenizer, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = ChatTemplate(smollm2.chat_template, bos_token=smollm2.bos_token, eos_token=smollm2.eos_token)
    for messages in CHATS:
        expected, _ = render_jinja_template(
            [messages], chat_template=smollm2.chat_template, add_generation_prompt=add_generation_prompt
        )
        assert chat.render(messages, add_generation_prompt=add_generation_prompt) == expected[0]


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMS = CHATML.replace("m.content", "(m.content | trim)")
FINALS = ["The answer is", "The answer is ", " spaces \n", "", "FINAL_MESSAGE_ENDS_HERE ", "a<|im_end|>b"]


@pytest.mark.parametrize("final", FINALS)
@pytest.mark.parametrize("template", [CHATML, TRIMS, TEMPLATES[0], TEMPLATES[2]])
def test_a_final_message_is_continued_as_in_transformers(template: str, final: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*CHATS[0], {"role": "assistant", "content": final}]
    chat = ChatTemplate(template, bos_token="<s>", eos_token="</s>")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    try:
        expected, _ = render_jinja_template([messages], chat_template=template, continue_final_message=True, **tokens)
    except ValueError:
        with pytest.raises(InvalidRequest, match="does not write the final message"):
            chat.render(messages, add_generation_prompt=False, continue_final_message=True)
    else:
        assert chat.render(messages, add_generation_prompt=False, continue_final_message=True) == expected[0]


def test_a_final_message_is_not_continued_and_followed() -> None:
    with pytest.raises(InvalidRequest, match="exclude each other"):
        ChatTemplate(CHATML).render(CHATS[0], continue_final_message=True)


def test_a_final_message_that_is_not_written_is_not_continued() -> None:
    with pytest.raises(InvalidRequest, match="does not write the final message"):
        ChatTemplate("{{ messages[-1].content | upper }}").render(
            CHATS[0], add_generation_prompt=False, continue_final_message=True
        )


def test_text_parts_are_joined_by_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"


def test_missing_tokens_render_as_nothing() -> None:
    assert ChatTemplate("[{{ bos_token }}{{ eos_token }}]").render(CHATS[0]) == "[]"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "not be empty"),
        ("hi", "must be a list, not str"),
        ({"role": "user"}, "must be a list, not dict"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([CHATS[0][0], {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": 1, "content": "x"}], r"messages\[0\].role must be a string, not int"),
        ([{"role": "user", "content": None}], r"messages\[0\].content must be a string or a list"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] must be .* 'image_url' parts"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] must be .* 'str' parts"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a string"),
    ],
)
def test_refuses_bad_messages(messages: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        ChatTemplate("x").render(messages)


def test_the_templates_own_refusal_reaches_the_client() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(CHATS[0])


@pytest.mark.parametrize(
    "template", ["{{ 1 + 'a' }}", "{{ messages.append(1) }}", "{{ x.y.z }}", "{{ ''.__class__() }}"]
)
def test_errors_in_rendering_are_the_requests(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refused"):
        ChatTemplate(template).render(CHATS[0])


@pytest.mark.parametrize("template", ["{% for %}", "{{ x | nosuchfilter }}"])
def test_a_template_that_does_not_parse_is_the_models_fault(template: str) -> None:
    with pytest.raises(CorruptModel, match="does not parse"):
        ChatTemplate(template)


def test_a_model_without_a_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(None).render(CHATS[0])


def test_a_template_nested_too_deeply() -> None:
    with pytest.raises(CorruptModel, match="nested too deeply"):
        ChatTemplate("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}")
