"""Grammars of requests are compiled in processes that end: whatever they ask for, the router goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from fake_workers import make_bundle
from twinstage.errors import InvalidRequest, Overloaded, TaskNotSupported
from twinstage.grammar import checking
from twinstage.grammar.checking import CheckLimits, GrammarChecks
from twinstage.text.bundle import TokenizerBundle
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types.constraints import GrammarBackend, RawReasoning
from twinstage.types.constraints import RawStructuredOutput as Raw

TOKENIZER = TextTokenizer(make_bundle())
LIMITS = CheckLimits(cpu_s=1.0, memory_bytes=512 * 1024 * 1024)


@pytest.fixture
async def checks() -> AsyncIterator[GrammarChecks]:
    checks = GrammarChecks(limits=LIMITS)
    yield checks
    await checks.close()


async def refusal(checks: GrammarChecks, raw: Raw) -> tuple[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        await checks.judge(raw, TOKENIZER)
    (violation,) = caught.value.violations
    return violation.field, violation.description


async def test_good_and_bad(checks: GrammarChecks) -> None:
    constraint = await checks.judge(Raw.json_schema('{"type": "object"}'), TOKENIZER)
    assert constraint.answer.backend is GrammarBackend.LLGUIDANCE
    field, description = await refusal(checks, Raw.json_schema('{"not": {}}'))
    assert field == "structured_output.json_schema"
    assert "not" in description
    reasoning = RawReasoning(end="<eos>", constraint=Raw.regex("("))
    field, _ = await refusal(checks, Raw.regex("a", reasoning=reasoning))
    assert field == "structured_output.reasoning.constraint.regex"


BOMBS = [
    Raw.regex("(((((a{1,100}){1,100}){1,100}){1,100}){1,100}){1,100}"),
    Raw.regex("(.*a.{40}){30}" + "|.*b" * 500),
    Raw.json_schema({"enum": [f"value {index}" * 3 for index in range(6000)]}),
    Raw.json_schema({"type": "array", "items": {"type": "string"}, "minItems": 10**6}),
    Raw.json_schema({"type": "string", "minLength": 10**9, "maxLength": 10**9}),
    Raw.json_schema({"$ref": "#"}),
    Raw.grammar("start: " + " ".join(f"r{index}" for index in range(2000)) + '\nr0: "a"'),
    Raw.grammar("start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(400)) + '\nr400: "a"'),
]


async def test_bombs_are_survived(checks: GrammarChecks) -> None:
    """Each is compiled after all, or refused, within the limits; and the next honest request is served."""
    for bomb in BOMBS:
        with contextlib.suppress(InvalidRequest):
            await checks.judge(bomb, TOKENIZER)
    await checks.judge(Raw.regex("[0-9]+"), TOKENIZER)


async def test_a_process_that_takes_too_long_is_killed() -> None:
    checks = GrammarChecks(limits=CheckLimits(cpu_s=0.002))
    try:
        field, description = await refusal(checks, BOMBS[2])
        assert (field, "0.002 s of a processor" in description) == ("structured_output.json_schema", True), description
    finally:
        await checks.close()


async def test_verdicts_are_remembered(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    await checks.judge(Raw.regex("ab"), TOKENIZER)
    await refusal(checks, Raw.regex("("))
    monkeypatch.setattr(checking, "start_bare", None)
    for process in checks._compilers.values():
        await process.end()
    await checks.judge(Raw.regex("ab"), TOKENIZER)
    await refusal(checks, Raw.regex("("))


async def test_a_client_that_leaves_disturbs_nobody(checks: GrammarChecks) -> None:
    first = asyncio.create_task(checks.judge(Raw.regex("abc"), TOKENIZER))
    second = asyncio.create_task(checks.judge(Raw.regex("abc"), TOKENIZER))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).answer.text == "abc"
    assert not checks._pending


async def test_too_many_at_once_are_refused(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MAX_PENDING", 2)
    calls = [asyncio.create_task(checks.judge(Raw.regex(text), TOKENIZER)) for text in ("a", "b", "c")]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results].count(Overloaded) == 1


async def test_a_tokenizer_that_no_backend_reads_is_not_the_client_s_fault(checks: GrammarChecks) -> None:
    class Unreadable(TextTokenizer):
        def __init__(self) -> None:
            super().__init__(make_bundle())
            self.bundle = TokenizerBundle(tokenizer_json="{}")

    with pytest.raises(TaskNotSupported, match="llguidance cannot use"):
        await checks.judge(Raw.regex("a"), Unreadable())
    await checks.judge(Raw.regex("a"), TOKENIZER)
