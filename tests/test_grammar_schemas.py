"""A hundred JSON schemas on a model of random weights: whatever it would rather say, what it completes is valid.

All are generated together in one engine, with sampling that makes nearly every allowed token equally likely.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from grammar_schemas import SCHEMAS
from twinstage.engine.llm import LLM, LlmOptions
from twinstage.engine.speculation import SpeculationOptions
from twinstage.errors import InvalidRequest
from twinstage.grammar.compiled import CompiledGrammars
from twinstage.grammar.resolve import resolve_constraint
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import Finish, FinishReason, RequestId, SamplingParameters, SequenceSpec
from twinstage.types.constraints import GrammarBackend, RawStructuredOutput

MAX_TOKENS = 400
FORMATS = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), LlmOptions(threads=1, kv_cache_bytes=64 << 20, max_num_sequences=128)) as llm:
        yield llm


def almost_uniform(tokenizer: TextTokenizer, seed: int) -> SamplingParameters:
    """Hot, and with a liking for what closes something, so that outputs come to an end."""
    closing = [token_id for text in ('"', "}", "]", ",") for token_id in tokenizer.encode(text)]
    return SamplingParameters(temperature=20.0, seed=seed, logit_bias=dict.fromkeys(closing, 60.0))


def generate(
    llm: LLM, grammars: CompiledGrammars, outputs: dict[str, RawStructuredOutput]
) -> dict[str, tuple[str, Finish]]:
    """The text of each, by name, all in the same batches."""
    for seed, (name, raw) in enumerate(outputs.items()):
        constraint = resolve_constraint(raw, llm.tokenizer)
        spec = SequenceSpec(
            request_id=RequestId(name),
            prompt_token_ids=(5,),
            sampling=almost_uniform(llm.tokenizer, seed),
            max_tokens=MAX_TOKENS,
            stop_token_ids=frozenset(llm.tokenizer.bundle.eos_token_ids),
            constraint=constraint,
        )
        llm.core.add(spec, matcher=grammars.start_now(constraint))
    ids: dict[str, list[int]] = {name: [] for name in outputs}
    ends: dict[str, Finish] = {}
    while llm.core.has_work:
        step = llm.core.step()
        assert not step.failed
        for chunk in step.chunks:
            ids[chunk.request_id] += [token.token_id for token in chunk.tokens]
            if chunk.finish is not None:
                ends[chunk.request_id] = chunk.finish
    assert llm.pool.num_free == llm.pool.num_blocks
    return {name: (llm.tokenizer.decode(ids[name]), ends[name]) for name in outputs}


@pytest.mark.parametrize("backend", list(GrammarBackend))
def test_every_completed_output_is_valid(llm: LLM, backend: GrammarBackend) -> None:
    assert len(SCHEMAS) >= 100
    grammars = CompiledGrammars(llm.tokenizer.bundle, apart=())
    outputs = {name: RawStructuredOutput.json_schema(schema, backend=backend) for name, schema in SCHEMAS.items()}
    if backend is GrammarBackend.XGRAMMAR:  # which refuses more, and knows formats by their syntax only
        outputs = {name: raw for name, raw in outputs.items() if _compiles(llm, grammars, raw)}
        assert len(outputs) > 50
    answers = generate(llm, grammars, outputs)
    completed = {name: text for name, (text, finish) in answers.items() if finish.reason is FinishReason.STOP}
    formats = FORMATS if backend is GrammarBackend.LLGUIDANCE else None
    for name, text in completed.items():
        jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=formats)
    assert len(completed) >= 0.95 * len(outputs), sorted(set(outputs) - set(completed))


def test_guesses_and_preemption_change_nothing(tiny_model: Path, llm: LLM) -> None:
    """A pool for one and a half sequences, and guesses from what was written: each document is the one of plenty."""
    rows = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 12}, "minItems": 12, "maxItems": 12}
    asked: dict[str, Any] = {
        "prompts": [[5], [6], [7]],
        "sampling": SamplingParameters(temperature=1.0, seed=3),
        "max_tokens": 200,
        "structured_output": RawStructuredOutput.json_schema(rows),
    }
    expected = llm.generate(**asked)
    assert all(len(json.loads(result.text)) == 12 for result in expected)
    scarce = LlmOptions(threads=1, block_size=8, kv_cache_bytes=120_000, speculation=SpeculationOptions(method="ngram"))
    with LLM(str(tiny_model), scarce) as other:
        assert [result.token_ids for result in other.generate(**asked)] == [result.token_ids for result in expected]


def _compiles(llm: LLM, grammars: CompiledGrammars, raw: RawStructuredOutput) -> bool:
    try:
        grammars.start_now(resolve_constraint(raw, llm.tokenizer))
    except InvalidRequest:
        return False
    return True
