"""Admission: every violation at once with its path, three tiers of defaults, lengths, and kinds."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from fake_workers import MAX_MODEL_LEN, make_bundle, make_model
from router.admission import Admission, check_fields, kind_of, resolve_sampling
from router.admission.answers import ParserChoice
from router.admission.capabilities import Capability, capabilities_of
from router.catalog import Work, find_model
from router.embedding_admission import admit_inputs
from router.generation import Deadlines
from router.pairing import Pairing
from router.worker_entry import ServedModel
from twinstage.errors import (
    InvalidRequest,
    NotFound,
    NoWorker,
    TaskNotSupported,
)
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import (
    AdmittedRequest,
    BatchPrompt,
    ChatMessage,
    ChatPrompt,
    RawEncodeRequest,
    RawGenerationRequest,
    RawOutput,
    RawRepetition,
    RawSampling,
    RawStopping,
    Task,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolChoice,
    ToolChoiceMode,
    Truncation,
)
from twinstage.types.constraints import Constraint, ConstraintForm, GrammarBackend, OutputConstraint

PAIRING = Pairing(
    task="generate", model_fingerprint="m", tokenizer_fingerprint="t", kv_layout_fingerprint="k", protocol_version=1
)


def served(task: Task = Task.GENERATE, *, name: str = "fake", **bundle: Any) -> ServedModel:
    bundle = {key: tuple(value.items()) if isinstance(value, dict) else value for key, value in bundle.items()}
    defaults = dict(bundle.pop("generation_defaults", ()))
    made = replace(make_bundle(), generation_defaults=defaults, **bundle)
    return ServedModel(
        description=make_model(name=name, task=task, bundle=made), pairing=PAIRING, tokenizer=TextTokenizer(made)
    )


@pytest.fixture(name="admission")
def make_admission() -> AsyncIterator[Admission]:
    with ThreadPoolExecutor(1) as executor:
        yield Admission(executor)


async def admit(admission: Admission, raw: RawGenerationRequest, model: ServedModel | None = None) -> AdmittedRequest:
    (request,) = await admit_all(admission, raw, model)
    return request


async def admit_all(
    admission: Admission, raw: RawGenerationRequest, model: ServedModel | None = None
) -> list[AdmittedRequest]:
    model = model or served()
    check_fields(raw, model)
    return await admission.admit(raw, model, request_id="id", arrived_s=0.0, deadline_s=1.0)


def text(prompt: str = "hello", **changes: Any) -> RawGenerationRequest:
    return RawGenerationRequest(prompt=TextPrompt(text=prompt), **changes)


def violated(error: InvalidRequest) -> list[str]:
    return [violation.field for violation in error.violations]


def repetition(**limits: int) -> dict[str, Any]:
    return {"stopping": RawStopping(repetition=RawRepetition(**limits))}


# --- fields ---------------------------------------------------------------------------------------

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"sampling": RawSampling(n=0)}, "sampling.n"),
    ({"sampling": RawSampling(temperature=-0.1)}, "sampling.temperature"),
    ({"sampling": RawSampling(temperature=math.nan)}, "sampling.temperature"),
    ({"sampling": RawSampling(temperature=math.inf)}, "sampling.temperature"),
    ({"sampling": RawSampling(top_p=0.0)}, "sampling.top_p"),
    ({"sampling": RawSampling(top_p=1.01)}, "sampling.top_p"),
    ({"sampling": RawSampling(top_k=0)}, "sampling.top_k"),
    ({"sampling": RawSampling(min_p=1.5)}, "sampling.min_p"),
    ({"sampling": RawSampling(repetition_penalty=0.0)}, "sampling.repetition_penalty"),
    ({"sampling": RawSampling(repetition_penalty=2.1)}, "sampling.repetition_penalty"),
    ({"sampling": RawSampling(presence_penalty=-2.1)}, "sampling.presence_penalty"),
    ({"sampling": RawSampling(frequency_penalty=2.1)}, "sampling.frequency_penalty"),
    ({"sampling": RawSampling(logit_bias={257: 1.0})}, "sampling.logit_bias[257]"),
    ({"sampling": RawSampling(logit_bias={5: 101.0})}, "sampling.logit_bias[5]"),
    ({"sampling": RawSampling(logit_bias={5: math.nan})}, "sampling.logit_bias[5]"),
    ({"stopping": RawStopping(max_tokens=0)}, "stopping.max_tokens"),
    ({"stopping": RawStopping(max_tokens=3, min_tokens=4)}, "stopping.min_tokens"),
    ({"stopping": RawStopping(min_tokens=17)}, "stopping.min_tokens"),
    ({"stopping": RawStopping(stop=("a", ""))}, "stopping.stop[1]"),
    ({"stopping": RawStopping(stop=("a",) * 17)}, "stopping.stop"),
    ({"stopping": RawStopping(stop_token_ids=(1, 2, 257))}, "stopping.stop_token_ids[2]"),
    ({"stopping": RawStopping(time_limit_s=0.0)}, "stopping.time_limit"),
    (repetition(min_pattern_size=0), "stopping.repetition_detection.min_pattern_size"),
    (repetition(min_pattern_size=257), "stopping.repetition_detection.min_pattern_size"),
    (repetition(max_pattern_size=257), "stopping.repetition_detection.max_pattern_size"),
    (repetition(min_pattern_size=5, max_pattern_size=4), "stopping.repetition_detection.max_pattern_size"),
    (repetition(min_count=1), "stopping.repetition_detection.min_count"),
    ({"output": RawOutput(logprobs=21)}, "output.logprobs"),
    ({"output": RawOutput(prompt_logprobs=21)}, "output.prompt_logprobs"),
    ({"priority": 101}, "priority"),
    ({"cache_salt": "é" * 65}, "cache_salt"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"request_id": "tab\t"}, "request_id"),
    ({"request_id": "é"}, "request_id"),
]


@pytest.mark.parametrize(("changes", "field"), BAD_FIELDS)
def test_bad_field_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_fields(text(**changes), served())
    assert violated(caught.value) == [field]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        (TextPrompt(text=""), "prompt"),
        (TokenPrompt(token_ids=()), "prompt_token_ids.ids"),
        (TokenPrompt(token_ids=(1, 2, 3, 257)), "prompt_token_ids.ids[3]"),
        (ChatPrompt(messages=()), "messages"),
        (ChatPrompt(messages=(ChatMessage(role="", content="hi"),)), "messages[0].role"),
        (BatchPrompt(prompts=()), "batch.prompts"),
        (BatchPrompt(prompts=(TextPrompt(text="a"), TextPrompt(text=""))), "batch.prompts[1].prompt"),
        (BatchPrompt(prompts=(TokenPrompt(token_ids=(300,)),)), "batch.prompts[0].prompt_token_ids.ids[0]"),
    ],
)
def test_bad_prompt_is_named(prompt: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_fields(RawGenerationRequest(prompt=prompt), served())
    assert violated(caught.value) == [field]


def test_all_violations_come_at_once() -> None:
    raw = RawGenerationRequest(
        prompt=TextPrompt(text=""),
        sampling=RawSampling(temperature=math.nan, top_p=7),
        stopping=RawStopping(stop=("",)),
        output=RawOutput(logprobs=50),
    )
    with pytest.raises(InvalidRequest) as caught:
        check_fields(raw, served())
    assert set(violated(caught.value)) == {
        "prompt",
        "sampling.temperature",
        "sampling.top_p",
        "stopping.stop[0]",
        "output.logprobs",
    }


def test_tools_that_a_model_cannot_call_are_a_violation_among_others() -> None:
    """By what its capability tells. Calls that a grammar forces, or that may not come, need nobody who knows them."""
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content="?"),), tools=(Tool(name="f"),))
    raw = RawGenerationRequest(prompt=prompt, sampling=RawSampling(top_p=7.0))
    for parsers in (ParserChoice(), ParserChoice(tool={"fake": "hermes"})):
        with pytest.raises(InvalidRequest) as caught:
            check_fields(raw, served(), parsers)
        can_call = Capability.TOOLS in capabilities_of(served(), parsers)
        assert set(violated(caught.value)) == {"sampling.top_p"} | (set() if can_call else {"tools"})
    assert can_call
    for mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NONE):
        check_fields(RawGenerationRequest(prompt=replace(prompt, tool_choice=ToolChoice(mode=mode))), served())


def test_a_bad_list_does_not_crowd_out_the_rest() -> None:
    raw = RawGenerationRequest(prompt=TokenPrompt(token_ids=(999,) * 1000), priority=500)
    with pytest.raises(InvalidRequest) as caught:
        check_fields(raw, served())
    assert len(caught.value.violations) < 20
    assert "priority" in violated(caught.value)


# --- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "stopping", "fits"),
    [
        (MAX_MODEL_LEN - 2, RawStopping(), True),
        (MAX_MODEL_LEN - 1, RawStopping(), True),
        (MAX_MODEL_LEN, RawStopping(), False),
        (MAX_MODEL_LEN + 1, RawStopping(), False),
        (MAX_MODEL_LEN - 8, RawStopping(max_tokens=8), True),
        (MAX_MODEL_LEN - 7, RawStopping(max_tokens=8), False),
        (MAX_MODEL_LEN - 4, RawStopping(min_tokens=4), True),
        (MAX_MODEL_LEN - 3, RawStopping(min_tokens=4), False),
    ],
)
async def test_prompt_and_what_it_insists_on_fit_the_context(
    admission: Admission, length: int, stopping: RawStopping, fits: bool
) -> None:
    raw = text("a" * length, stopping=stopping)
    if fits:
        assert len((await admit(admission, raw)).spec.prompt_token_ids) == length
        return
    with pytest.raises(InvalidRequest) as caught:
        await admit(admission, raw)
    assert violated(caught.value) == ["prompt"]
    assert f"prompt 0 has {length} tokens" in str(caught.value)
    assert f"limit of {MAX_MODEL_LEN}" in str(caught.value)


# --- defaults -------------------------------------------------------------------------------------


async def test_api_defaults(admission: Admission) -> None:
    spec = (await admit(admission, text())).spec
    assert spec.max_tokens == 16
    assert spec.sampling.temperature == 1.0
    assert (spec.sampling.top_p, spec.sampling.top_k, spec.sampling.min_p) == (1.0, 0, 0.0)
    assert spec.stop_token_ids == {256}
    assert spec.logprobs is None


def test_model_defaults_come_before_the_api_s_and_behind_the_request_s() -> None:
    model = served(generation_defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1})
    sampling = resolve_sampling(RawSampling(top_k=5), model)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 5, 0.9)
    assert sampling.repetition_penalty == 1.1


def test_model_that_does_not_sample_is_greedy_unless_asked() -> None:
    model = served(generation_defaults={"do_sample": False})
    assert resolve_sampling(RawSampling(), model).is_greedy
    assert resolve_sampling(RawSampling(temperature=0.5), model).temperature == 0.5


def test_nonsense_in_the_model_s_file_is_not_a_default() -> None:
    model = served(generation_defaults={"top_k": -1, "top_p": 7.0, "temperature": -1.0})
    sampling = resolve_sampling(RawSampling(), model)
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (0, 1.0, 1.0)


async def test_max_tokens_of_the_model_is_the_second_tier(admission: Admission) -> None:
    model = served(generation_defaults={"max_new_tokens": 40})
    assert (await admit(admission, text(), model)).spec.max_tokens == 40
    asked = text(stopping=RawStopping(max_tokens=3))
    assert (await admit(admission, asked, model)).spec.max_tokens == 3


async def test_chat_is_rendered_without_more_special_tokens_and_runs_to_the_limit(admission: Admission) -> None:
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content="hi"),))
    model = served()
    spec = (await admit(admission, RawGenerationRequest(prompt=prompt), model)).spec
    assert model.tokenizer.decode(spec.prompt_token_ids) == "user:hi;"
    assert len(spec.prompt_token_ids) + spec.max_tokens > MAX_MODEL_LEN


async def test_token_ids_are_used_as_they_are(admission: Admission) -> None:
    raw = RawGenerationRequest(prompt=TokenPrompt(token_ids=(3, 1, 4)))
    assert (await admit(admission, raw)).spec.prompt_token_ids == (3, 1, 4)
    assert (await admit(admission, text(cache_salt="tenant"))).spec.cache_salt == "tenant"


async def test_seed_is_kept_or_drawn(admission: Admission) -> None:
    assert (await admit(admission, text(sampling=RawSampling(seed=0)))).spec.sampling.seed == 0
    drawn = {(await admit(admission, text())).spec.sampling.seed for _ in range(3)}
    assert len(drawn) == 3


async def test_ignore_eos_leaves_only_the_caller_s_stop_tokens(admission: Admission) -> None:
    stopping = RawStopping(ignore_eos=True, stop_token_ids=(9,))
    assert (await admit(admission, text(stopping=stopping))).spec.stop_token_ids == {9}


# --- which model ----------------------------------------------------------------------------------


def test_model_lookup() -> None:
    generator, embedder = served(name="writer"), served(Task.EMBED, name="embedder")
    both = {"writer": generator, "embedder": embedder}
    assert find_model(both, "", work=Work.GENERATE) is generator
    assert find_model(both, "embedder", work=Work.EMBED) is embedder
    with pytest.raises(NotFound) as caught:
        find_model(both, "other", work=Work.GENERATE)
    assert (caught.value.resource_type, caught.value.resource_name) == ("model", "other")
    with pytest.raises(TaskNotSupported):
        find_model(both, "embedder", work=Work.GENERATE)
    with pytest.raises(TaskNotSupported):
        find_model({"embedder": embedder}, "", work=Work.GENERATE)
    with pytest.raises(InvalidRequest, match="one of a, b"):
        find_model({"a": generator, "b": generator}, "", work=Work.GENERATE)
    with pytest.raises(NoWorker):
        find_model({}, "", work=Work.GENERATE)
    unheard = ["worker:50061"]  # of which nobody knows yet what it serves
    with pytest.raises(NoWorker, match=r"worker:50061 .* 'other' is not served"):
        find_model(both, "other", work=Work.GENERATE, unheard=unheard)
    with pytest.raises(NoWorker, match=r"worker:50061 .* can generate text"):
        find_model({"embedder": embedder}, "", work=Work.GENERATE, unheard=unheard)
    assert find_model(both, "writer", work=Work.GENERATE, unheard=unheard) is generator


# --- inputs to embed ------------------------------------------------------------------------------


def encode(*inputs: Any, **changes: Any) -> RawEncodeRequest:
    return RawEncodeRequest(inputs=inputs, **changes)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (encode(), "inputs"),
        (encode(inputs_field="texts"), "texts"),
        (encode(TextPrompt(text="a"), TextPrompt(text="")), "inputs[1].text"),
        (encode(TextPrompt(text=""), inputs_field="texts"), "texts[0]"),
        (encode(None), "inputs[0]"),
        (encode(TextPrompt(text=""), inputs_field="input"), "input.text"),
        (encode(TokenPrompt(token_ids=())), "inputs[0].token_ids.ids"),
        (encode(TokenPrompt(token_ids=(257,))), "inputs[0].token_ids.ids"),
        (encode(TextPrompt(text="a"), dimensions=5), "dimensions"),
        (encode(TextPrompt(text="a"), dimensions=0), "dimensions"),
        (encode(TextPrompt(text="a"), truncation=Truncation(tokens=0)), "truncation.tokens"),
        (encode(TextPrompt(text="a"), truncation=Truncation(tokens=9)), "truncation.tokens"),
        (encode(TextPrompt(text="a" * 9)), "inputs[0].text"),
        (encode(*[TextPrompt(text="a")] * 2049), "inputs"),
    ],
)
def test_bad_input_is_named(raw: RawEncodeRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        admit_inputs(raw, served(Task.EMBED, max_input_tokens=8))
    assert violated(caught.value) == [field]


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation(to_model_limit=True), "cdefghij"),
        (Truncation(to_model_limit=True, keep_last=False), "abcdefgh"),
        (Truncation(tokens=3), "hij"),
        (Truncation(tokens=3, keep_last=False), "abc"),
    ],
)
def test_truncation(truncation: Truncation, kept: str) -> None:
    model = served(Task.EMBED, max_input_tokens=8)
    by_text = admit_inputs(encode(TextPrompt(text="abcdefghij"), truncation=truncation), model)
    assert model.tokenizer.decode(by_text[0].token_ids) == kept
    ids = TokenPrompt(token_ids=tuple(model.tokenizer.encode("abcdefghij")))
    assert admit_inputs(encode(ids, truncation=truncation), model) == by_text


# --- kinds ----------------------------------------------------------------------------------------


def test_requests_of_a_kind_are_of_like_size() -> None:
    model = served()

    def kind(text: str, **stopping: Any) -> tuple[str, int, int]:
        return kind_of(RawGenerationRequest(prompt=TextPrompt(text=text), stopping=RawStopping(**stopping)), model)

    assert kind("Hello") == kind("Howdy!") == kind("Hello", max_tokens=16)
    assert kind("Hello") != kind("Hello" * 9)
    assert kind("Hello") != kind("Hello", max_tokens=1)
    ids = RawGenerationRequest(prompt=TokenPrompt(token_ids=(1,)))
    chat = RawGenerationRequest(prompt=ChatPrompt(messages=(ChatMessage(role="user", content="Hello"),)))
    assert kind_of(ids, model) == kind("Hello")
    assert kind_of(chat, model)[:2] == kind("Hello")[:2]
    assert kind_of(chat, served(name="other")) != kind_of(chat, model)


def test_no_deadline_is_later_than_the_longest() -> None:
    deadlines = Deadlines(default_s=100, longest_s=10)
    for asked_s, given_s in ((None, 10), (5.0, 5), (50.0, 10)):
        assert deadlines.deadline_s(asked_s) - time.monotonic() == pytest.approx(given_s, abs=1)


def test_a_list_of_wrong_ids_gives_a_few_violations_only() -> None:
    raw = RawGenerationRequest(prompt=TokenPrompt(token_ids=(10**6,) * 5000))
    with pytest.raises(InvalidRequest) as caught:
        check_fields(raw, served())
    assert violated(caught.value) == [f"prompt_token_ids.ids[{index}]" for index in range(8)]


@pytest.mark.parametrize(("ignore_eos", "stop_token_ids"), [(False, ()), (True, (7,))])
async def test_what_ends_the_generation_ends_no_reasoning(
    admission: Admission, ignore_eos: bool, stop_token_ids: tuple[int, ...]
) -> None:
    grammar = Constraint(backend=GrammarBackend.LLGUIDANCE, form=ConstraintForm.REGEX, text="a")
    stopping = RawStopping(ignore_eos=ignore_eos, stop_token_ids=stop_token_ids)
    raw = RawGenerationRequest(prompt=TextPrompt(text="Hi"), stopping=stopping)
    times = {"arrived_s": 0.0, "deadline_s": 1.0}
    marked = OutputConstraint(answer=grammar, reasoning_end_ids=(7, 256))
    with pytest.raises(InvalidRequest) as caught:
        await admission.admit(raw, served(), request_id="id", constraint=marked, **times)
    assert violated(caught.value) == ["structured_output.reasoning.end"]
    other = replace(marked, reasoning_end_ids=(8,))
    (request,) = await admission.admit(raw, served(), request_id="id", constraint=other, **times)
    assert request.spec.constraint == other
