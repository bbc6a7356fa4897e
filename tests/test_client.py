"""The Python client: what it sends, what it makes of answers and failures, and what leaving a scope does."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import pytest

from fake_public_api import FakeApi, serving
from proxy import SlowProxy
from twinstage.client import (
    AsyncGenerationStream,
    AsyncTwinstageClient,
    Delta,
    Encoding,
    GenerationStream,
    Options,
    Output,
    PoolingParameters,
    PoolingTask,
    PromptInfo,
    Repetition,
    Sampling,
    Stopping,
    TwinstageClient,
    requests,
)
from twinstage.client.inputs import GenerationInput
from twinstage.errors import (
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidRequest,
    KvExhausted,
    NotFound,
    NoWorker,
    StreamBroken,
    TwinstageError,
    Unavailable,
)
from twinstage.rpc.convert_public import (
    chat_request_from_proto,
    embed_request_from_proto,
    encode_request_from_proto,
    generate_request_from_proto,
)
from twinstage.types import (
    BatchPrompt,
    ChatMessage,
    ChatPrompt,
    Finish,
    FinishReason,
    Placement,
    RawGenerationRequest,
    Role,
    Task,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolChoice,
    ToolChoiceMode,
    Truncation,
    Usage,
)

END = Finish(reason=FinishReason.STOP, matched_token_id=2)


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serving(FakeApi()) as served:
        yield served


@pytest.fixture
def client(api: FakeApi) -> Iterator[TwinstageClient]:
    with TwinstageClient(api.address, retries=0) as connected:
        yield connected


EVERYTHING = Options(
    model="m",
    request_id="r-1",
    sampling=Sampling(
        n=2,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.3,
        seed=2**64 - 1,
        logit_bias={7: -1.5},
    ),
    stopping=Stopping(
        max_tokens=9,
        min_tokens=1,
        stop=("a",),
        stop_token_ids=(4,),
        include_stop_str_in_output=True,
        ignore_eos=True,
        time_limit_s=1.5,
        repetition=Repetition(min_pattern_size=2, max_pattern_size=8, min_count=3),
    ),
    output=Output(logprobs=3, prompt_logprobs=0, return_token_ids=True, skip_special_tokens=False),
    priority=-3,
    cache_salt="tenant",
)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", TextPrompt(text="Hi")),
        (TokenPrompt(token_ids=(1, 2)), TokenPrompt(token_ids=(1, 2))),
        (
            BatchPrompt(prompts=(TextPrompt(text="a"), TokenPrompt(token_ids=(3,)))),
            BatchPrompt(prompts=(TextPrompt(text="a"), TokenPrompt(token_ids=(3,)))),
        ),
        ([1, 2], TokenPrompt(token_ids=(1, 2))),
        (
            ["a", TokenPrompt(token_ids=(3,)), "b"],
            BatchPrompt(prompts=(TextPrompt(text="a"), TokenPrompt(token_ids=(3,)), TextPrompt(text="b"))),
        ),
    ],
)
def test_the_router_reads_what_the_caller_said(
    api: FakeApi, client: TwinstageClient, prompt: GenerationInput, expected: object
) -> None:
    client.generate(prompt, EVERYTHING)
    assert generate_request_from_proto(api.requests[0]) == RawGenerationRequest(
        prompt=expected,  # type: ignore[arg-type]
        model="m",
        request_id="r-1",
        sampling=EVERYTHING.sampling,
        stopping=EVERYTHING.stopping,
        output=EVERYTHING.output,
        priority=-3,
        cache_salt="tenant",
    )


def test_what_is_left_out_stays_left_out(api: FakeApi, client: TwinstageClient) -> None:
    client.generate("Hi")
    assert generate_request_from_proto(api.requests[0]) == RawGenerationRequest(prompt=TextPrompt(text="Hi"))


def test_conversations(api: FakeApi, client: TwinstageClient) -> None:
    prompt = ChatPrompt(
        messages=(ChatMessage(role="user", content="Hi", name="Ann"),),
        chat_template="t",
        chat_template_kwargs={"count": 3, "deep": {"list": [1, None, True]}},
        add_generation_prompt=False,
        continue_final_message=True,
    )
    client.chat(prompt, EVERYTHING)
    client.chat([ChatMessage(role="system", content="x")])
    client.chat("Hello")
    sent = [chat_request_from_proto(request) for request in api.requests]
    assert (sent[0].prompt, sent[0].sampling, sent[0].priority) == (prompt, EVERYTHING.sampling, -3)
    assert sent[1].prompt == ChatPrompt(messages=(ChatMessage(role="system", content="x"),))
    assert sent[2].prompt == ChatPrompt(messages=(ChatMessage(role="user", content="Hello"),))


def test_where_several_texts_are_asked_for_one_stands_for_itself_and_not_for_its_characters(
    api: FakeApi, client: TwinstageClient
) -> None:
    client.generate("Hi", Options(stopping=Stopping(stop="END")))  # type: ignore[arg-type]
    client.embed("abc")
    list(client.embed_stream("abc"))
    client.score("q", "abc")
    client.rerank("q", "abc")
    generate, embed, stream, score, rerank = api.requests
    texts = [generate.stopping.stop, embed.texts, [stream.input.text], score.documents, rerank.documents]
    assert list(map(list, texts)) == [["END"], ["abc"], ["abc"], ["abc"], ["abc"]]


def test_messages_as_mappings(api: FakeApi, client: TwinstageClient) -> None:
    client.chat([{"role": "user", "content": "Hi"}], tools=[Tool(name="f")], tool_choice="required")
    client.chat(ChatMessage(role="user", content="Hi"))
    first, second = (chat_request_from_proto(request).prompt for request in api.requests)
    assert isinstance(first, ChatPrompt)
    assert isinstance(second, ChatPrompt)
    assert first.messages == second.messages == (ChatMessage(role="user", content="Hi"),)
    assert first.tool_choice == ToolChoice(mode=ToolChoiceMode.REQUIRED)


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.generate(None),
        lambda client: client.generate(b"Hi"),
        lambda client: client.generate([["a"]]),
        lambda client: client.chat([5]),
        lambda client: client.chat([{"role": "user", "text": "Hi"}]),
        lambda client: client.chat("Hi", tools=[{"name": "f"}]),
        lambda client: client.chat("Hi", tool_choice="unknown"),
        lambda client: client.chat("Hi", Options(structured_output={})),  # type: ignore[arg-type]
        lambda client: client.chat("\ud800"),
    ],
)
def test_what_stands_for_nothing_is_refused_before_it_is_sent(
    api: FakeApi, client: TwinstageClient, ask: Callable[[TwinstageClient], object]
) -> None:
    with pytest.raises(InvalidRequest, match="the request cannot be sent"):
        ask(client)
    assert not api.requests


def test_an_endless_timeout_is_none(client: TwinstageClient) -> None:
    assert client.generate("Hi", Options(timeout_s=float("inf"))).text == "Paris"


def test_a_rendered_prompt_is_that_of_the_same_chat() -> None:
    chat = requests.chat_request("Hi", Options(model="m"), tools=[Tool(name="f")], tool_choice="none")
    rendered = requests.render_request("Hi", "m", tools=[Tool(name="f")], tool_choice="none")
    assert (rendered.model, rendered.tool_choice) == ("m", chat.tool_choice)
    assert list(rendered.tools) == list(chat.tools)
    assert list(rendered.messages) == list(chat.messages)


def test_a_unary_answer(client: TwinstageClient) -> None:
    for answer in (client.generate("Hi"), client.chat("Hi")):
        assert (answer.text, answer.request_id, answer.model) == ("Paris", "r", "m")
        assert answer.results[0].finish == END
        assert answer.summary.usage == Usage(prompt_tokens=7, completion_tokens=3, cached_prompt_tokens=1)
        assert answer.summary.timing.total_s == 1.25
        assert answer.summary.placement == Placement(
            prefill_worker="prefill-0", decode_worker="decode-0", transport="shm", kv_bytes=2048, retries=1
        )


def test_a_streamed_answer(client: TwinstageClient) -> None:
    for stream in (client.generate_stream("Hi"), client.chat_stream("Hi")):
        assert list(stream) == [Delta(text="Par"), Delta(), Delta(text="is"), Delta(finish=END)]
        assert stream.prompt_info == PromptInfo(request_id="r", model="m", prompt_tokens=7)
        assert stream.summary is not None
        assert stream.summary.usage.completion_tokens == 3


def test_a_stream_that_breaks_off_is_not_called_an_absent_router(api: FakeApi) -> None:
    api.hangs = True
    with SlowProxy() as proxy:
        proxy.forward_to(api.address)
        with TwinstageClient(proxy.address) as client, client.chat_stream("Hi") as stream:
            assert next(stream).text == "Par"
            proxy.cut()
            with pytest.raises(Unavailable, match=r"broke off .*; the answer is not complete"):
                list(stream)


@pytest.mark.parametrize(
    ("address", "completed"),
    [
        ("localhost", "localhost:50051"),
        ("10.0.0.1", "10.0.0.1:50051"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("host:443", "host:443"),
        ("dns:///host", "dns:///host"),
        ("unix:/run/router.sock", "unix:/run/router.sock"),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", "ipv4:10.0.0.1:1,10.0.0.2:1"),
    ],
)
def test_an_address_without_a_port_gets_the_router_s(address: str, completed: str) -> None:
    with TwinstageClient(address) as client:
        assert client.address == completed


def test_leaving_the_scope_cancels(api: FakeApi, client: TwinstageClient) -> None:
    api.hangs = True
    with client.chat_stream("Hi") as stream:
        assert next(stream).text == "Par"
        assert not api.cancelled.is_set()
    assert api.cancelled.wait(10)


def test_a_cancelled_stream_says_so(api: FakeApi, client: TwinstageClient) -> None:
    api.hangs = True
    with client.chat_stream("Hi") as stream:
        next(stream)
        stream.cancel()
        with pytest.raises(Cancelled):
            list(stream)


def test_an_end_without_summary_is_no_answer(api: FakeApi, client: TwinstageClient) -> None:
    api.leaves_out_summary = True
    with pytest.raises(InternalError, match="summary"):
        list(client.generate_stream("Hi"))


ERRORS = [
    InvalidRequest([FieldViolation("sampling.temperature", "must not be NaN"), FieldViolation("prompt", "is empty")]),
    NotFound("no model x", resource_type="model", resource_name="x"),
    KvExhausted("full", retry_after_s=2.5),
    NoWorker("nobody", retry_after_s=0.5),
    StreamBroken("lost", tokens_sent=4),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.reason)
def test_errors_arrive_with_their_parts(api: FakeApi, client: TwinstageClient, error: TwinstageError) -> None:
    api.error = error
    with pytest.raises(type(error)) as unary:
        client.generate("Hi")
    stream = client.chat_stream("Hi")
    assert next(stream).text == "Par"
    with pytest.raises(type(error)) as streamed:
        list(stream)
    for caught in (unary.value, streamed.value):
        assert type(caught) is type(error)
        assert str(caught) == str(error)
        assert vars(caught) == vars(error)


def test_numbers_that_no_message_holds_are_refused(client: TwinstageClient) -> None:
    for options in (
        Options(sampling=Sampling(n=-1)),
        Options(stopping=Stopping(time_limit_s=float("inf"))),
        Options(priority=2**40),
    ):
        with pytest.raises(InvalidRequest, match="the request cannot be sent"):
            client.generate("Hello", options)
        with pytest.raises(InvalidRequest, match="the request cannot be sent"):
            client.chat("Hello", options)


def test_a_deadline(api: FakeApi, client: TwinstageClient) -> None:
    api.hangs = True
    with pytest.raises(DeadlineExceeded):
        list(client.generate_stream("Hi", Options(timeout_s=0.3)))


def test_no_router() -> None:
    with TwinstageClient("127.0.0.1:1") as client, pytest.raises(Unavailable, match=r"127\.0\.0\.1:1.*twinstage serve"):
        client.workers()
    with (
        TwinstageClient("http://127.0.0.1:1") as client,
        pytest.raises(Unavailable, match=r"no router.*twinstage serve"),
    ):
        client.workers()


def test_embeddings(api: FakeApi, client: TwinstageClient) -> None:
    truncation = Truncation(tokens=4, keep_last=False)
    embeddings = client.embed(["a", "b"], model="e", normalize=False, dimensions=2, truncation=truncation)
    assert embeddings.vectors == ((1.0, -2.0), (1.0, -2.0))
    client.embed(["a"], truncation=Truncation(to_model_limit=True), prompt_name="")
    first, second = (embed_request_from_proto(request) for request in api.requests)
    assert first.inputs == (TextPrompt(text="a"), TextPrompt(text="b"))
    assert (first.model, first.normalize, first.dimensions, first.truncation) == ("e", False, 2, truncation)
    assert (first.prompt_name, second.prompt_name) == (None, "")
    assert (second.normalize, second.truncation) == (True, Truncation(to_model_limit=True))


def test_a_stream_of_texts(api: FakeApi, client: TwinstageClient) -> None:
    results = list(
        client.embed_stream((text for text in ("a", "bad", "ccc")), model="e", dimensions=2, prompt_name="q")
    )
    assert [result.index for result in results] == [0, 1, 2]
    assert [result.vector for result in results] == [(1.0, -2.0), (), (3.0, -2.0)]
    assert isinstance(results[1].error, InvalidRequest)
    asked = [(request.model, request.dimensions, request.prompt_name) for request in api.requests]
    assert asked == [("e", 2, "q")] * 3


def test_any_task_of_a_pooling_model(api: FakeApi, client: TwinstageClient) -> None:
    cut = Truncation(tokens=9)
    each = (PoolingParameters(dimensions=2, truncation=cut), PoolingParameters(prompt_name="", normalize=False))
    inputs = ["a", TokenPrompt(token_ids=(5, 6))]
    encodings = client.encode(inputs, task=PoolingTask.TOKEN_EMBED, model="m", parameters=each)
    assert [result.index for result in encodings.results] == [0, 1]
    assert [list(row) for row in encodings.results[1].rows] == [[0.25, 0.75]] * 2
    asked = encode_request_from_proto(api.requests[0])
    assert asked.inputs == (TextPrompt(text="a"), TokenPrompt(token_ids=(5, 6)))
    assert asked.parameters == tuple(replace(entry, task=PoolingTask.TOKEN_EMBED) for entry in each)
    with pytest.raises(InvalidRequest, match="call score"):
        client.encode(["a"], task=PoolingTask.SCORE)


def test_a_stream_of_any_task_ends_with_the_error_of_its_inputs(api: FakeApi, client: TwinstageClient) -> None:
    def inputs() -> Iterator[str]:
        yield "ab"
        yield "bad"
        raise OSError("no more")

    results: list[Encoding] = []
    with pytest.raises(OSError, match="no more"):
        results.extend(client.encode_stream(inputs(), task=PoolingTask.TOKEN_EMBED))
    for results_of in (client.embed_stream(["a", "\ud800", "b"]), client.encode_stream(["a", 7, "b"])):  # type: ignore[list-item]
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            assert len(list(results_of)) == 1
    assert len(api.requests) == 4


def test_scores_and_rankings(api: FakeApi, client: TwinstageClient) -> None:
    assert client.score("q", ["a", "b"], model="e").scores == (0.5, -0.5)
    ranking = client.rerank("q", ["a", "b", "c"], top_n=2, truncation=Truncation(tokens=4))
    assert [(entry.index, entry.score) for entry in ranking.documents] == [(2, 2.0), (1, 1.0)]
    assert ranking.summary.usage.prompt_tokens == 7
    scored, ranked = api.requests
    assert (list(scored.queries), list(scored.documents), scored.model) == (["q"], ["a", "b"], "e")
    assert (ranked.query, ranked.top_n, ranked.truncation.tokens) == ("q", 2, 4)


def test_workers_and_models(client: TwinstageClient) -> None:
    ready, refused = client.workers()
    assert (ready.worker_id, ready.role, ready.state, ready.free_kv_blocks) == ("decode-0", Role.DECODE, "ready", 60)
    assert (refused.worker_id, refused.role, refused.state, refused.detail) == ("", None, "refused", "other layout")
    assert (ready.cached_kv_blocks, ready.prefix_looked_up_blocks, ready.prefix_found_blocks) == (9, 8, 6)
    (reset,) = client.reset_prefix_cache(worker_id="prefill-0")
    assert (reset.worker_id, reset.dropped_blocks) == ("prefill-0", 4)
    assert client.drain_worker("prefill-0").unfinished == 3
    assert client.drain_worker("prefill-0", wait=True, timeout_s=5.0).state == "draining"
    assert client.undrain_worker("prefill-0").state == "ready"
    (model,) = client.models()
    assert (model.name, model.task, model.max_model_len, model.ready) == ("m", Task.GENERATE, 8192, True)


async def test_the_asyncio_client(api: FakeApi) -> None:
    async with AsyncTwinstageClient(api.address) as client:
        assert (await client.generate("Hi")).text == "Paris"
        assert (await client.chat("Hi")).results[0].finish == END
        assert (await client.embed(["a"])).vectors == ((1.0, -2.0),)
        assert [result.vector async for result in client.embed_stream(["a", "bad"])] == [(1.0, -2.0), ()]
        assert len((await client.encode(["a"], task=PoolingTask.TOKEN_EMBED)).results[0].rows) == 2
        results = [len(result.rows) async for result in client.encode_stream(["a"], task=PoolingTask.TOKEN_EMBED)]
        assert results == [2]

        async def failing() -> AsyncIterator[str]:
            yield "a"
            raise OSError("no more")

        with pytest.raises(OSError, match="no more"):
            _ = [result async for result in client.embed_stream(failing())]
        assert (await client.score(["q"], ["a"])).scores == (0.5,)
        assert (await client.rerank("q", ["a", "b"])).documents[0].index == 1
        assert len(await client.workers()) == 2
        assert (await client.models())[0].name == "m"
        assert (await client.reset_prefix_cache())[0].dropped_blocks == 4
        assert (await client.drain_worker("decode-0")).unfinished == 3
        assert (await client.undrain_worker("decode-0")).state == "ready"
        async with client.chat_stream("Hi") as stream:
            assert [delta.text async for delta in stream] == ["Par", "", "is", ""]
        assert stream.summary is not None
        async with client.generate_stream("Hi") as stream:
            assert "".join([delta.text async for delta in stream]) == "Paris"


async def test_leaving_the_scope_cancels_in_asyncio(api: FakeApi) -> None:
    api.hangs = True
    async with AsyncTwinstageClient(api.address) as client, client.chat_stream("Hi") as stream:
        async for delta in stream:
            assert delta.text == "Par"
            break
        assert not api.cancelled.is_set()
        stream.cancel()
        with pytest.raises(Cancelled):
            _ = [delta async for delta in stream]
    assert api.cancelled.wait(10)


async def test_a_stream_that_nobody_holds_is_cancelled_in_asyncio(api: FakeApi) -> None:
    api.hangs = True
    async with AsyncTwinstageClient(api.address) as client:
        async for _ in client.chat_stream("Hi"):
            break
        assert await asyncio.to_thread(api.cancelled.wait, 10)  # though the connection is open


def test_an_asyncio_client_may_be_made_before_there_is_a_loop(api: FakeApi) -> None:
    client = AsyncTwinstageClient(api.address)

    async def ask() -> str:
        async with client:
            return (await client.generate("Hi")).text

    assert asyncio.run(ask()) == "Paris"
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(ask())


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.reason)
async def test_errors_arrive_in_asyncio(api: FakeApi, error: TwinstageError) -> None:
    api.error = error
    async with AsyncTwinstageClient(api.address, retries=0) as client:
        with pytest.raises(type(error)) as unary:
            await client.generate("Hi")
        with pytest.raises(type(error)) as streamed:
            _ = [delta async for delta in client.generate_stream("Hi")]
    assert vars(unary.value) == vars(streamed.value) == vars(error)


def test_import_is_light() -> None:
    """Neither torch nor Transformers, and below a second of CPU time."""
    program = (
        "import sys, time, twinstage.client, twinstage.cli.main;"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules);"
        "assert time.process_time() < 1.0, time.process_time()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_both_clients_have_the_same_methods() -> None:
    def methods(client: type) -> dict[str, list[str]]:
        members = inspect.getmembers(client, inspect.isfunction)
        return {name: list(inspect.signature(method).parameters) for name, method in members if name[0] != "_"}

    assert methods(TwinstageClient) == methods(AsyncTwinstageClient)
    streams = (GenerationStream, AsyncGenerationStream)
    names = [{name for name in dir(stream) if not name.startswith("_")} for stream in streams]
    assert names[0] == names[1]
