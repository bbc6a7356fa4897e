"""Renders conversations with a model's chat template.

Templates are Jinja programs that come with models and, in `chat_template`, from clients, so they run in a sandbox:
attribute access is restricted, nothing outside can be changed, and results have a limit. Time and memory have none:
templates that nobody vouches for are run by `template_process`. What a template may use
(filters, globals, whitespace rules, the `generation` block) is what Transformers' `apply_chat_template` offers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.text.bundle import TokenizerBundle
from twinstage.text.chat_messages import effort_variables, message_variables, tool_variables, with_readable_arguments
from twinstage.types import ChatPrompt

MAX_RENDERED_CHARACTERS = 16 * 1024 * 1024
_MAX_INTEGER_BITS = 4096

# Put behind the last message to find where it ends in the prompt. The space shows whether the template trims messages.
_END_OF_MESSAGE = "\ue000end-of-continued-message\ue001 "
_RESERVED_VARIABLES = ("messages",)
# What evaluating a template can raise besides Jinja's own errors: it is a program over values of any type.
_EVALUATION_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A template, all that it is given, and the field to blame when it fails."""

    template: str
    variables: Mapping[str, Any]
    blamed_field: str
    continues: bool


def render_chat(bundle: TokenizerBundle, prompt: ChatPrompt) -> str:
    """Render the prompt's conversation. Raises InvalidRequest that names the field to change."""
    rendering = prepare(bundle, prompt)
    return finish(rendering, run(rendering))


def prepare(bundle: TokenizerBundle, prompt: ChatPrompt) -> Rendering:
    """Everything that comes before the template runs. Raises InvalidRequest."""
    _check_messages(prompt)
    template_text = prompt.chat_template or bundle.chat_template
    if template_text is None:
        raise _invalid("chat_template", "the model has no chat template; pass one here or call Generate")
    blamed_field = "chat_template" if prompt.chat_template else "messages"
    variables = {**bundle.special_tokens, **_merged_options(prompt)}
    continues = bool(variables.pop("continue_final_message"))
    messages = message_variables(prompt, template_text)
    if continues:
        messages[-1]["content"] += _END_OF_MESSAGE
    return Rendering(
        template=template_text,
        variables={**variables, "messages": messages},
        blamed_field=blamed_field,
        continues=continues,
    )


def finish(rendering: Rendering, rendered: str) -> str:
    """The prompt, from what the template gave. Raises InvalidRequest."""
    return _cut_at_end_of_message(rendered) if rendering.continues else rendered


def _check_messages(prompt: ChatPrompt) -> None:
    if not prompt.messages:
        raise _invalid("messages", "must hold at least one message")
    violations = [
        FieldViolation(f"messages[{index}].role", "must not be empty")
        for index, message in enumerate(prompt.messages)
        if not message.role
    ]
    violations += option_violations(prompt)
    if violations:
        raise InvalidRequest(violations)


def option_violations(prompt: ChatPrompt) -> Iterator[FieldViolation]:
    """What is wrong with the options of a conversation, which has messages, whatever the template."""
    for name in _RESERVED_VARIABLES:
        if name in prompt.chat_template_kwargs:
            yield FieldViolation(f"chat_template_kwargs.{name}", "is set by the service")
    turn = _turn_options(prompt)
    if turn["add_generation_prompt"] and turn["continue_final_message"]:
        yield FieldViolation("add_generation_prompt", "excludes continue_final_message; set only one of them")
    if turn["continue_final_message"] and prompt.messages[-1].tool_calls:
        yield FieldViolation("continue_final_message", "the last message has tool calls, which cannot be continued")


def _turn_options(prompt: ChatPrompt) -> dict[str, Any]:
    """How the prompt ends; `chat_template_kwargs` win."""
    options: dict[str, Any] = {
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
    }
    options |= {name: prompt.chat_template_kwargs[name] for name in options if name in prompt.chat_template_kwargs}
    if options["add_generation_prompt"] is None:
        options["add_generation_prompt"] = not options["continue_final_message"]
    return options


def _merged_options(prompt: ChatPrompt) -> dict[str, Any]:
    """The template's variables save messages."""
    return {
        "tools": tool_variables(prompt),
        "documents": None,
        **effort_variables(prompt.reasoning_effort),
        **prompt.chat_template_kwargs,
        **_turn_options(prompt),
    }


def _cut_at_end_of_message(rendered: str) -> str:
    """Cut behind the continued message; without its trailing space where the template trims messages."""
    marker = _END_OF_MESSAGE.rstrip()
    position = rendered.rfind(marker)
    if position < 0:
        raise _invalid("continue_final_message", "the chat template does not show the end of the last message")
    text = rendered[:position]
    return text if rendered.startswith(_END_OF_MESSAGE, position) else text.rstrip()


def run(rendering: Rendering) -> str:
    """Run the template. Raises InvalidRequest for all that can go wrong in it."""
    pieces: list[str] = []
    blamed_field = rendering.blamed_field
    size = 0
    variables = dict(rendering.variables)
    if "messages" in variables:
        variables["messages"] = with_readable_arguments(variables["messages"])
    try:
        for piece in _compiled(rendering.template).generate(variables):
            size += len(piece)
            if size > MAX_RENDERED_CHARACTERS:
                raise SecurityError(f"the prompt exceeds {MAX_RENDERED_CHARACTERS} characters")
            pieces.append(piece)
    except jinja2.TemplateSyntaxError as error:
        raise _invalid(
            blamed_field, f"the chat template is wrong in line {error.lineno}: {_short(error.message)}"
        ) from error
    except _EVALUATION_ERRORS as error:
        raise _invalid(blamed_field, f"the chat template refused the conversation: {_short(_words(error))}") from error
    rendered = "".join(pieces)
    if not _is_unicode(rendered):
        raise _invalid(blamed_field, "gives text with half a surrogate pair, which is not Unicode")
    return rendered


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _invalid(field: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(field, description)])


def _words(error: Exception) -> str:
    return str(error) or ("it needs too much memory" if isinstance(error, MemoryError) else "")


def _short(text: str | None) -> str:
    """At most 300 characters: messages of templates may quote the conversation."""
    text = text or "no message"
    return text if len(text) <= 300 else text[:297] + "..."


# --- the environment ------------------------------------------------------------------------------


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}...{% endgeneration %}`, with which training marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a limit for results of multiplication and powers, by which a few characters fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and _bits(left) * max(1, _magnitude(right)) > _MAX_INTEGER_BITS:
            raise SecurityError("a power is too large")
        if operator == "*" and _bits(left) + _bits(right) > _MAX_INTEGER_BITS:
            raise SecurityError("a product is too large")
        if operator == "*" and max(_repeated_size(left, right), _repeated_size(right, left)) > MAX_RENDERED_CHARACTERS:
            raise SecurityError("a repeated value is too large")
        return super().call_binop(context, operator, left, right)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which could reach into the interpreter."""

    def __init__(*args: Any, **attributes: Any) -> None:  # so that `namespace(self=...)` works
        values = dict(*args[1:], **attributes)
        for name in values:
            _check_namespace_name(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_namespace_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_namespace_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: names with a leading underscore are not allowed")


def _magnitude(value: Any) -> float:
    return abs(value) if isinstance(value, (int, float)) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _repeated_size(value: Any, times: Any) -> float:
    return len(value) * _magnitude(times) if isinstance(value, (str, list, tuple)) else 0


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@lru_cache(maxsize=64)
def _compiled(template_text: str) -> jinja2.Template:
    return _environment().from_string(template_text)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = lambda *args, **values: dict(*args, **values)  # a function has no class to reach for
    return environment
