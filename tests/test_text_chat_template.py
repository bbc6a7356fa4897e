"""Chat templates render as Transformers' apply_chat_template renders them; what is refused names its field."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from twinstage.errors import InvalidRequest
from twinstage.text.bundle import TokenizerBundle
from twinstage.text.chat_template import render_chat
from twinstage.types import ChatMessage, ChatPrompt, ToolCall

# Written for this test in the manner of the families that they are named after.
CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA3 = """\
{{ bos_token }}
{%- set found = namespace(system=false) %}
{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{% for message in messages %}
    {% if message['role'] == 'system' %}{% set found.system = true %}{% endif %}
<|start_header_id|>{{ message['role'] }}<|end_header_id|>

{{ message['content'] | trim }}<|eot_id|>
{%- endfor %}
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}
{%- if not found.system %}{# nothing to say #}{% endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {% generation %}{{- " " + message["content"] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{% if message.name is defined %}({{ message.name }}) {% endif %}
{% if message['content'] is string %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim }}{{ '<end_of_turn>\\n' }}
{% else %}{% continue %}{% endif %}
{% if loop.index > 20 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
{{ dict(a=1) | tojson }}{{ messages | length }}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA}
CONVERSATIONS = {
    "question": (ChatMessage(role="user", content="Hi <b>&amp; 'you'"),),
    "system": (ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="  spaces \n")),
    "turns": (
        ChatMessage(role="user", content="日本語"),
        ChatMessage(role="assistant", content="Yes. "),
        ChatMessage(role="user", content="And?\n\n", name="Ann"),
    ),
    "answer": (ChatMessage(role="user", content="Count."), ChatMessage(role="assistant", content="1, 2,  ")),
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def bundle_of(template: str | None) -> TokenizerBundle:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    return TokenizerBundle(
        tokenizer_json=tokenizer.to_str(), chat_template=template, special_tokens=SPECIAL_TOKENS, eos_token_ids=(1,)
    )


def reference(template: str, prompt: ChatPrompt, **options: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1})), chat_template=template, **SPECIAL_TOKENS
    )
    messages = [
        {"role": message.role, "content": message.content, **({"name": message.name} if message.name else {})}
        for message in prompt.messages
    ]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


@pytest.mark.parametrize(
    ("family", "conversation"), list(itertools.product(TEMPLATES, CONVERSATIONS)), ids=lambda value: str(value)
)
@pytest.mark.parametrize(
    ("options", "kwargs"),
    [
        ({}, {}),
        ({"add_generation_prompt": False}, {}),
        ({}, {"enable_thinking": False, "bos_token": "<other>"}),
        ({}, {"tools": [{"name": "search", "count": 3, "tags": ["a", "<b>"]}]}),
        ({"continue_final_message": True}, {}),
    ],
)
def test_equal_to_transformers(family: str, conversation: str, options: dict[str, Any], kwargs: dict[str, Any]) -> None:
    prompt = ChatPrompt(messages=CONVERSATIONS[conversation], chat_template_kwargs=kwargs, **options)
    continues = options.get("continue_final_message", False)
    expected = reference(
        TEMPLATES[family],
        prompt,
        add_generation_prompt=options.get("add_generation_prompt", not continues),
        continue_final_message=continues,
        **kwargs,
    )
    assert render_chat(bundle_of(TEMPLATES[family]), prompt) == expected
    given = ChatPrompt(
        messages=prompt.messages, chat_template=TEMPLATES[family], chat_template_kwargs=kwargs, **options
    )
    assert render_chat(bundle_of("another template"), given) == expected


def test_continuing_leaves_the_last_message_open() -> None:
    prompt = ChatPrompt(messages=CONVERSATIONS["answer"], continue_final_message=True)
    assert render_chat(bundle_of(CHATML), prompt).endswith("<|im_start|>assistant\n1, 2,  ")
    assert render_chat(bundle_of(GEMMA), prompt).endswith("<start_of_turn>model\n1, 2,")


USER = (ChatMessage(role="user", content="Hi"),)


def refused_field(prompt: ChatPrompt, *, template: str | None = CHATML) -> str:
    with pytest.raises(InvalidRequest) as caught:
        render_chat(bundle_of(template), prompt)
    (violation,) = caught.value.violations
    assert violation.description
    assert len(violation.description) < 400
    return violation.field


@pytest.mark.parametrize(
    ("options", "kwargs"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, {}),
        ({"continue_final_message": True}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": True}, {"continue_final_message": True}),
        ({}, {"add_generation_prompt": True, "continue_final_message": True}),
    ],
)
def test_continuing_excludes_a_generation_prompt_wherever_they_are_given(
    options: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    prompt = ChatPrompt(messages=USER, chat_template_kwargs=kwargs, **options)
    assert refused_field(prompt) == "add_generation_prompt"


def test_kwargs_can_resolve_the_conflict() -> None:
    prompt = ChatPrompt(
        messages=USER,
        add_generation_prompt=True,
        continue_final_message=True,
        chat_template_kwargs={"add_generation_prompt": False},
    )
    assert render_chat(bundle_of(CHATML), prompt).endswith("user\nHi")


def test_refusals_name_the_field() -> None:
    assert refused_field(ChatPrompt(messages=())) == "messages"
    assert refused_field(ChatPrompt(messages=(*USER, ChatMessage(role="", content="x")))) == "messages[1].role"
    assert refused_field(ChatPrompt(messages=USER), template=None) == "chat_template"
    assert refused_field(ChatPrompt(messages=USER, chat_template="{% for %}")) == "chat_template"
    assert refused_field(ChatPrompt(messages=USER * 2), template=MISTRAL) == "messages"
    reserved = ChatPrompt(messages=USER, chat_template_kwargs={"messages": []})
    assert refused_field(reserved) == "chat_template_kwargs.messages"
    call = ToolCall(id="1", name="f")
    calling = (ChatMessage(role="assistant", tool_calls=(call,)),)
    continuing = ChatPrompt(messages=calling, chat_template_kwargs={"continue_final_message": True})
    assert refused_field(continuing) == "continue_final_message"
    dropping = ChatPrompt(messages=USER, continue_final_message=True, chat_template="nothing of it")
    assert refused_field(dropping) == "continue_final_message"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__init__=1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ 'x' * 100000000000 }}",
        "{{ [1] * 10 ** 12 }}",
        "{{ ((9 ** 99) ** 99) ** 99 }}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 1 / 0 }}",
        "{{ none + 1 }}",
        "{{ messages[7].role }}",
        "{{ raise_exception('x' * 5000) }}",
        "{% include 'other' %}",
    ],
)
def test_hostile_templates_are_refused(template: str) -> None:
    assert refused_field(ChatPrompt(messages=USER, chat_template=template)) == "chat_template"


def test_half_a_surrogate_pair_is_refused() -> None:
    """It would fail later, where text is encoded."""
    bundle = TokenizerBundle(tokenizer_json="{}", chat_template="{{ '\\ud800' }}")
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content="Hi"),))
    with pytest.raises(InvalidRequest, match="not Unicode"):
        render_chat(bundle, prompt)
