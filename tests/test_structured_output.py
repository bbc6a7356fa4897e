"""Structured output through router, prefill and decode workers: every form, with all that can come between."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from harness import ProcessCluster
from twinstage.client import GrammarBackend, Options, Output, Reasoning, Sampling, Stopping, TwinstageClient
from twinstage.client import StructuredOutput as Structured
from twinstage.errors import InvalidRequest
from twinstage.types import FinishReason
from twinstage.types.constraints import ConstraintForm
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.xdist_group("tiny")

PROMPT = "The answer is"
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
        "values": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 3,
            "maxItems": 5,
        },
        "ok": {"type": "boolean"},
    },
    "required": ["id", "values", "ok"],
    "additionalProperties": False,
}
EBNF = 'root ::= "(" root ")" | "ab" [0-9] [0-9]'
LARK = 'start: "<" start ">" | NAME\nNAME: /[a-f]{3}/'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<call>",
        "content": {
            "type": "json_schema",
            "json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "end": "</call>",
    },
}


@pytest.fixture(scope="module")
def client(tiny_cluster: ProcessCluster) -> Iterator[TwinstageClient]:
    with TwinstageClient(tiny_cluster.address) as client:
        yield client
    tiny_cluster.wait_idle()


def options(
    structured: Structured, *, seed: int = 3, max_tokens: int = 200, timeout_s: float = 60, **stopping: Any
) -> Options:
    return Options(
        sampling=Sampling(seed=seed, temperature=2.0),
        stopping=Stopping(max_tokens=max_tokens, **stopping),
        structured_output=structured,
        timeout_s=timeout_s,
    )


def check_schema(text: str) -> bool:
    document = json.loads(text)
    return bool(re.fullmatch("[A-Z]{2}[0-9]{4}", document["id"])) and 3 <= len(document["values"]) <= 5


FORMS: list[tuple[Structured, Any]] = [
    (Structured.json_schema(SCHEMA), check_schema),
    (Structured.regex("[0-9]{3}-[a-f]{20,30}"), re.compile("[0-9]{3}-[a-f]{20,30}").fullmatch),
    (Structured.choice(["left", "right", "straight ahead"]), {"left", "right", "straight ahead"}.__contains__),
    (Structured.grammar(LARK), re.compile("<*[a-f]{3}>*").fullmatch),
]
XGRAMMAR_FORMS: list[tuple[Structured, Any]] = [
    (Structured.structural_tag(TAG), re.compile(r"<call>\s*\[.*\]\s*</call>", re.DOTALL).fullmatch),
    (Structured.grammar(EBNF), re.compile(r"\(*ab[0-9]{2}\)*").fullmatch),
    (Structured.json_schema(SCHEMA, backend=GrammarBackend.XGRAMMAR), check_schema),
]


def ask(client: TwinstageClient, prompt: str, structured: Structured, check: Any, *, seed: int) -> None:
    # Importing torch, which xgrammar does, takes minutes on a machine that is busy enough.
    (result,) = client.generate(prompt, options(structured, seed=seed, timeout_s=240)).results
    if result.finish.reason is FinishReason.STOP:
        assert check(result.text), (structured, result.text)
    else:
        assert structured.form is ConstraintForm.GRAMMAR, "only a grammar without a bound can go on for ever"


def test_forms_over_two_workers(client: TwinstageClient) -> None:
    """All at once, several seeds each: batches in which every row has a grammar of its own, or none."""
    jobs = [(structured, check, seed) for structured, check in FORMS for seed in (1, 2, 3)]
    with ThreadPoolExecutor(len(jobs) + 1) as threads:
        free = threads.submit(client.generate, PROMPT, Options(stopping=Stopping(max_tokens=40, ignore_eos=True)))
        list(threads.map(lambda job: ask(client, PROMPT, job[0], job[1], seed=job[2]), jobs))
        assert free.result().results[0].finish.reason is FinishReason.LENGTH


@pytest.mark.timeout(300)
def test_forms_of_xgrammar_over_two_workers(client: TwinstageClient) -> None:
    """One after the other on a prompt that its workers know, as each worker that imports the library pays for torch."""
    for structured, check in XGRAMMAR_FORMS:
        ask(client, "Whoever asks the same again is served where it was asked before. " * 3, structured, check, seed=1)


def test_any_json_object(client: TwinstageClient) -> None:
    closing = {token_id: 60.0 for text in ('"', "}", "]", ",") for token_id in client.tokenize(text)}
    answer = client.generate(
        PROMPT,
        Options(
            sampling=Sampling(seed=4, temperature=20.0, logit_bias=closing),
            stopping=Stopping(max_tokens=300),
            structured_output=Structured.json_object(),
        ),
    )
    assert isinstance(json.loads(answer.results[0].text), dict)


def test_a_chat_and_a_stream_give_the_same(client: TwinstageClient) -> None:
    asked = options(Structured.json_schema(SCHEMA), seed=9)
    whole = client.chat("Fill the form.", asked).results[0]
    with client.chat_stream("Fill the form.", asked) as stream:
        assert "".join(delta.text for delta in stream) == whole.text
    assert check_schema(whole.text)
    assert whole.finish.reason is FinishReason.STOP


def test_each_of_several_choices_has_a_matcher_of_its_own(client: TwinstageClient) -> None:
    asked = options(Structured.json_schema(SCHEMA), seed=5)
    answer = client.generate(PROMPT, replace(asked, sampling=replace(asked.sampling, n=4)))
    texts = [result.text for result in answer.results if result.finish.reason is FinishReason.STOP]
    assert len(set(texts)) == 4
    assert all(map(check_schema, texts))
    assert answer.results[0].text == client.generate(PROMPT, asked).results[0].text


def test_stop_strings_and_limits_end_a_document_early(client: TwinstageClient) -> None:
    stopped = client.generate(PROMPT, options(Structured.json_schema(SCHEMA), stop=('"values',))).results[0]
    assert (stopped.finish.reason, stopped.finish.matched_text) == (FinishReason.STOP, '"values')
    assert stopped.text.startswith("{")
    assert '"values' not in stopped.text
    cut = client.generate(PROMPT, options(Structured.json_schema(SCHEMA), max_tokens=5)).results[0]
    assert cut.finish.reason is FinishReason.LENGTH


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_cannot_hold_up_what_is_complete(client: TwinstageClient, ignore_eos: bool) -> None:
    """`[0-9]+` may always go on, so min_tokens are written; a choice may not, so it ends before."""
    long = client.generate(
        PROMPT, options(Structured.regex("[0-9]+"), min_tokens=30, max_tokens=60, ignore_eos=ignore_eos)
    )
    assert long.summary.usage.completion_tokens >= 30
    assert re.fullmatch("[0-9]+", long.results[0].text)
    short = client.generate(
        PROMPT, options(Structured.choice(["yes", "no"]), min_tokens=30, max_tokens=60, ignore_eos=ignore_eos)
    ).results[0]
    assert short.text in ("yes", "no")
    assert short.finish.reason is FinishReason.STOP
    assert short.finish.matched_token_id is None


def test_log_probabilities_are_those_before_the_grammar(client: TwinstageClient) -> None:
    asked = options(Structured.choice(["q"]))
    answer = client.generate(
        PROMPT, Options(sampling=asked.sampling, output=Output(logprobs=3), structured_output=asked.structured_output)
    )
    free = client.generate(PROMPT, Options(stopping=Stopping(max_tokens=1), output=Output(logprobs=3)))
    (token,), (other,) = answer.results[0].logprobs, free.results[0].logprobs
    assert answer.results[0].text == "q"
    assert token.top == other.top
    assert token.rank > 1


def test_reasoning_comes_before_the_answer(client: TwinstageClient) -> None:
    """The tiny model's <|im_start|> stands for a marker; it is made likely, as a model that reasons would."""
    (marker,) = client.tokenize("<|im_start|>", add_special_tokens=False)
    reasoning = Reasoning(end="<|im_start|>")
    answer = client.generate(
        PROMPT,
        Options(
            sampling=Sampling(seed=1, temperature=2.0, logit_bias={marker: 30.0}),
            stopping=Stopping(max_tokens=200),
            output=Output(skip_special_tokens=False),
            structured_output=Structured.choice(["left", "right"], reasoning=reasoning),
        ),
    ).results[0]
    _, _, after = answer.text.partition("<|im_start|>")
    assert after in ("left", "right"), answer.text
    bound = Structured.choice(
        ["left", "right"], reasoning=Reasoning(end="<|im_start|>", constraint=Structured.regex("hm{2,5}"))
    )
    answer = client.generate(
        PROMPT, Options(output=Output(skip_special_tokens=False), structured_output=bound)
    ).results[0]
    assert re.fullmatch(r"hm{2,5}<\|im_start\|>(left|right)", answer.text), answer.text


@pytest.mark.parametrize(
    ("structured", "field"),
    [
        (Structured(form=None), "structured_output"),
        (Structured.json_schema("{"), "structured_output.json_schema"),
        (Structured.json_schema({"type": "no type"}), "structured_output.json_schema"),
        (Structured.regex("(a"), "structured_output.regex"),
        (Structured.regex("a", reasoning=Reasoning(end="</none>")), "structured_output.reasoning.end"),
        (Structured.grammar("start: missing"), "structured_output.grammar"),
        (Structured.choice([]), "structured_output.choice"),
        (Structured.structural_tag({"type": "structural_tag"}), "structured_output.structural_tag"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_queued(
    client: TwinstageClient, structured: Structured, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate(PROMPT, Options(structured_output=structured))
    assert field in [violation.field for violation in caught.value.violations]


def test_all_violations_come_at_once(client: TwinstageClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate("", Options(sampling=Sampling(top_p=7), structured_output=Structured.regex("")))
    fields = {violation.field for violation in caught.value.violations}
    assert fields == {"prompt", "sampling.top_p", "structured_output.regex"}


def test_json_object_false_is_no_constraint(tiny_cluster: ProcessCluster) -> None:
    request = generation_pb2.GenerateRequest(
        prompt=PROMPT, structured_output=common_pb2.StructuredOutput(json_object=False)
    )
    with tiny_cluster.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=30)
    status = rpc_status.from_call(caught.value)
    bad = error_details_pb2.BadRequest()
    assert status is not None
    assert any(detail.Unpack(bad) for detail in status.details)
    assert [violation.field for violation in bad.field_violations] == ["structured_output"]
