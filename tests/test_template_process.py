"""Templates of requests run in processes that end: whatever they do, the router goes on and learns whom to blame."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from twinstage.errors import InvalidRequest, Overloaded
from twinstage.text import template_process
from twinstage.text.bundle import TokenizerBundle
from twinstage.text.chat_template import render_chat
from twinstage.text.template_process import MAX_PENDING_PER_PROCESS, ProcessLimits, TemplateProcesses
from twinstage.types import ChatMessage, ChatPrompt

BUNDLE = TokenizerBundle(tokenizer_json="{}", special_tokens={"bos_token": "<s>"})
LIMITS = ProcessLimits(cpu_s=1, memory_bytes=256 * 1024 * 1024)
# `range` within a sandbox gives at most 100,000 numbers, so these nest.
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LONG = "{% for a in range(99999) %}twenty characters...{% endfor %}"
GREEDY = "{% set n = namespace(x='x' * 1000) %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


def _prompt(template: str, **options: object) -> ChatPrompt:
    messages = (ChatMessage(role="user", content="Grüße 👋 \x00"),)
    return ChatPrompt(messages=messages, chat_template=template, chat_template_kwargs=options)


async def _refusal(template: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await TemplateProcesses(limits=LIMITS).render(BUNDLE, _prompt(template))
    (violation,) = caught.value.violations
    assert violation.field == "chat_template"
    return violation.description


async def test_it_renders_what_the_router_itself_would() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ tools | tojson }}"
    for options in ({}, {"tools": [{"name": "f", "limit": 1.5}], "continue_final_message": True}):
        prompt = _prompt(template if not options else template.replace("{{ tools | tojson }}", ""), **options)
        assert await TemplateProcesses(limits=LIMITS).render(BUNDLE, prompt) == render_chat(BUNDLE, prompt)


async def test_time_and_memory_are_limited() -> None:
    descriptions = await asyncio.gather(_refusal(ENDLESS), _refusal(GREEDY))
    assert descriptions[0] == "the chat template computes for more than 1 s"
    assert "memory" in descriptions[1].lower() or "characters" in descriptions[1], descriptions[1]


async def test_errors_of_templates_come_back() -> None:
    assert "wrong in line 1" in await _refusal("{% if %}")
    assert "no way" in await _refusal("{{ raise_exception('no way') }}")


async def test_a_render_that_is_given_up_leaves_no_process() -> None:
    others = _children()
    rendering = asyncio.create_task(TemplateProcesses(limits=ProcessLimits()).render(BUNDLE, _prompt(ENDLESS)))
    children = await _new_children(others)
    rendering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rendering
    assert not children & _children()


async def test_a_render_that_is_given_up_ends_while_its_output_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun = asyncio.Event()

    async def read_a_byte(process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        await process.stdout.readexactly(1)
        has_begun.set()
        await asyncio.Event().wait()
        return b""

    monkeypatch.setattr(template_process, "_read_answer", read_a_byte)
    rendering = asyncio.create_task(TemplateProcesses(limits=ProcessLimits()).render(BUNDLE, _prompt(LONG)))
    await asyncio.wait_for(has_begun.wait(), 20)
    await asyncio.sleep(0.2)  # until the buffer is full, so that the pipe is not read any more
    rendering.cancel()
    done, _ = await asyncio.wait({rendering}, timeout=5)
    assert done
    assert rendering.cancelled()


async def _new_children(others: set[str]) -> set[str]:
    """Children of this process as soon as there are some besides `others`, which are those of fixtures."""
    found: set[str] = set()

    async def look() -> None:
        while not (children := _children() - others):  # noqa: ASYNC110 - nobody tells when a process begins
            await asyncio.sleep(0.01)
        found.update(children)

    await asyncio.wait_for(look(), 20)
    return found


def _environment(child: str) -> bytes:
    return Path(f"/proc/{child}/environ").read_bytes()


def _children() -> set[str]:
    pid = os.getpid()
    return {child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()}


async def test_a_machine_that_is_busy_is_not_the_clients_fault() -> None:
    processes = TemplateProcesses(limits=ProcessLimits(wall_s=0.001))
    with pytest.raises(Overloaded, match="within"):
        await processes.render(BUNDLE, _prompt("x"))


async def test_too_many_are_refused() -> None:
    processes = TemplateProcesses(1, limits=LIMITS)
    waiting = [asyncio.create_task(processes.render(BUNDLE, _prompt("x"))) for _ in range(MAX_PENDING_PER_PROCESS)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="being rendered"):
        await processes.render(BUNDLE, _prompt("x"))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_the_process_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a template that got out of the sandbox would find."""
    monkeypatch.setenv("TWINSTAGE_TEST_SECRET", "secret")
    others = _children()
    rendering = asyncio.create_task(TemplateProcesses(limits=ProcessLimits()).render(BUNDLE, _prompt(ENDLESS)))
    children = await _new_children(others)
    await asyncio.sleep(0.2)  # it has begun another program by then
    environments = [_environment(child) for child in children]
    rendering.cancel()
    await asyncio.gather(rendering, return_exceptions=True)
    assert environments
    assert all(b"PYTHONPATH" in environment and b"secret" not in environment for environment in environments)
