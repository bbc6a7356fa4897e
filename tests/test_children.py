"""Processes that are started to have something done apart: what is told where there is no room for one."""

from __future__ import annotations

import asyncio
import subprocess
from typing import NoReturn

import pytest

from fake_workers import make_bundle
from twinstage.errors import Overloaded, Unavailable
from twinstage.grammar.apart import ApartCompiler
from twinstage.grammar.checking import GrammarChecks
from twinstage.text.template_process import TemplateProcesses
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import ChatMessage, ChatPrompt
from twinstage.types.constraints import Constraint, ConstraintForm, GrammarBackend
from twinstage.types.constraints import RawStructuredOutput as Raw

BUNDLE = make_bundle()


def no_room(*_: object, **__: object) -> NoReturn:
    raise BlockingIOError(11, "Resource temporarily unavailable")


async def test_a_client_may_come_back_when_there_is_no_room_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_room)
    checks = GrammarChecks()
    with pytest.raises(Overloaded, match="no process could be started: Resource temporarily unavailable"):
        await checks.judge(Raw.regex("a"), TextTokenizer(BUNDLE))
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content="Hello"),), chat_template="x")
    with pytest.raises(Overloaded, match="no process could be started"):
        await TemplateProcesses().render(BUNDLE, prompt)
    await checks.close()


def test_another_worker_may_match_a_grammar_when_there_is_no_room_for_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", no_room)
    compiler = ApartCompiler(BUNDLE, GrammarBackend.XGRAMMAR)
    with pytest.raises(Unavailable, match="no process that matches grammars could be started"):
        compiler.compile(Constraint(backend=GrammarBackend.XGRAMMAR, form=ConstraintForm.REGEX, text="a"))
    compiler.close()
