"""The router as its clients see it: every public method over real gRPC, on workers without a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from fake_workers import FakeCluster, until
from router.config import RouterSettings
from router.service.context import caller_of, host_of
from router.service.generation import convert_answer
from served_router import details, failing, serving
from twinstage.errors import ComputeFailed, ConfigError
from twinstage.settings import read_settings
from twinstage.text.answers.joining import MessageJoiner
from twinstage.types import ProducedToken, TokenAlternative, TokenLogprobs
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

# --- generation -----------------------------------------------------------------------------------


async def test_bare_prompt_works() -> None:
    async with serving() as service:
        request = json_format.ParseDict({"prompt": "Hello"}, generation_pb2.GenerateRequest())
        response = await service.generation.Generate(request, timeout=10)
        assert len(response.results) == 1
        assert len(response.results[0].text) == 16
        assert response.results[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert response.model == "fake"
        assert response.request_id
        assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (5, 16)
        assert response.placement.prefill_worker == "prefill-0"
        assert response.placement.kv_bytes == 200


async def test_stream_equals_unary_and_has_its_events_in_order() -> None:
    async with serving() as service:
        request = generation_pb2.GenerateRequest(
            prompt="Hello",
            request_id="mine",
            sampling=common_pb2.SamplingOptions(seed=3),
            stopping=common_pb2.StoppingOptions(max_tokens=20),
            output=common_pb2.OutputOptions(logprobs=0, return_token_ids=True),
        )
        unary = await service.generation.Generate(request, timeout=10)
        events = [event async for event in service.generation.GenerateStream(request, timeout=10)]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "prompt_info"
        assert kinds[-2:] == ["finished", "summary"]
        assert set(kinds[1:-2]) == {"delta"}
        assert events[0].prompt_info.request_id == "mine"
        deltas = [event.delta for event in events if event.WhichOneof("event") == "delta"]
        assert "".join(delta.text for delta in deltas) == unary.results[0].text
        assert [token for delta in deltas for token in delta.token_ids] == list(unary.results[0].token_ids)
        assert sum(len(delta.logprobs) for delta in deltas) == len(unary.results[0].logprobs) == 20
        assert events[-1].summary.usage == unary.usage


async def test_every_prompt_and_choice_has_its_result_streamed_or_not() -> None:
    async with serving() as service:
        prompts = [generation_pb2.PromptInput(prompt=text) for text in ("one", "two")]
        request = generation_pb2.GenerateRequest(
            batch=generation_pb2.PromptBatch(prompts=prompts),
            sampling=common_pb2.SamplingOptions(seed=3, n=3),
            output=common_pb2.OutputOptions(logprobs=0, return_token_ids=True),
        )
        unary = await service.generation.Generate(request, timeout=10)
        assert [result.index for result in unary.results] == list(range(6))
        assert len({result.text for result in unary.results}) == 6
        assert (unary.usage.prompt_tokens, unary.usage.completion_tokens) == (6, 6 * 16)
        events = [event async for event in service.generation.GenerateStream(request, timeout=10)]
        assert [event.WhichOneof("event") for event in events].count("prompt_info") == 1
        assert sorted(event.finished.index for event in events if event.HasField("finished")) == list(range(6))
        for result in unary.results:
            deltas = [event.delta for event in events if event.HasField("delta") and event.delta.index == result.index]
            assert "".join(delta.text for delta in deltas) == result.text
            assert [token for delta in deltas for token in delta.token_ids] == list(result.token_ids)
            assert sum(len(delta.logprobs) for delta in deltas) == len(result.logprobs) == 16
        assert events[-1].summary.usage == unary.usage
        chat = generation_pb2.ChatRequest(
            messages=[generation_pb2.ChatMessage(role="user", content="hi")],
            sampling=common_pb2.SamplingOptions(seed=3, n=2),
        )
        answers = (await service.generation.Chat(chat, timeout=10)).results
        assert [answer.index for answer in answers] == [0, 1]
        chat.sampling.n = 1
        assert (await service.generation.Chat(chat, timeout=10)).results[0] == answers[0] != answers[1]


async def test_every_prompt_has_its_log_probabilities_although_it_is_a_single_token() -> None:
    async with serving() as service:
        prompts = [generation_pb2.PromptInput(prompt_token_ids=common_pb2.TokenIds(ids=ids)) for ids in ([5], [5, 6])]
        request = generation_pb2.GenerateRequest(
            batch=generation_pb2.PromptBatch(prompts=prompts), output=common_pb2.OutputOptions(prompt_logprobs=0)
        )
        scores = (await service.generation.Generate(request, timeout=10)).prompt_logprobs
        assert [(entry.prompt_index, entry.start, len(entry.tokens)) for entry in scores] == [(0, 1, 0), (1, 1, 1)]


async def test_chat() -> None:
    async with serving() as service:
        request = generation_pb2.ChatRequest(
            messages=[generation_pb2.ChatMessage(role="user", content="hi")],
            sampling=common_pb2.SamplingOptions(seed=3),
        )
        answer = await service.generation.Chat(request, timeout=10)
        assert answer.results[0].message.role == "assistant"
        assert answer.results[0].finish_reason == common_pb2.FINISH_REASON_CONTEXT_LIMIT
        events = [event async for event in service.generation.ChatStream(request, timeout=10)]
        text = "".join(event.delta.text for event in events if event.WhichOneof("event") == "delta")
        assert text == answer.results[0].message.content


async def test_bad_fields_come_back_with_their_paths() -> None:
    async with serving() as service:
        request = generation_pb2.GenerateRequest(
            prompt_token_ids=common_pb2.TokenIds(ids=[1, 999]),
            sampling=common_pb2.SamplingOptions(temperature=float("nan")),
            stopping=common_pb2.StoppingOptions(stop=["a", ""]),
        )
        for call in (service.generation.Generate(request), service.generation.GenerateStream(request).read()):
            error = await failing(call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            fields = {violation.field for violation in details(error)["BadRequest"].field_violations}
            assert fields == {"prompt_token_ids.ids[1]", "sampling.temperature", "stopping.stop[1]"}
        assert not service.generators.prefill[0].specs


async def test_errors_by_the_table() -> None:
    async with serving() as service:
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="x", model="other")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert details(error)["ResourceInfo"].resource_name == "other"
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="x", model="embedder")))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert details(error)["ErrorInfo"].reason == "TASK_NOT_SUPPORTED"
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="")))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="x" * 64)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        many = common_pb2.SamplingOptions(n=9)
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="x", sampling=many)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(error)["BadRequest"].field_violations[0].field == "sampling.n"
        service.generators.prefill[0].script.fail("first_token", ComputeFailed("no"), times=3)
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="x")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert details(error)["RetryInfo"].retry_delay.seconds == 1


async def test_no_initial_metadata_before_the_first_token() -> None:
    async with serving() as service:
        go_on = service.generators.prefill[0].script.stall("first_token")
        call = service.generation.GenerateStream(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10)
        metadata = asyncio.create_task(call.initial_metadata())
        await service.generators.prefill[0].script.reached("first_token").wait()
        await asyncio.sleep(0.1)
        assert not metadata.done()
        go_on.set()
        assert (await call.read()).WhichOneof("event") == "prompt_info"
        await metadata
        call.cancel()


@pytest.mark.parametrize("phase", ["first_token", "decode 3"])
async def test_client_that_goes_away_frees_the_workers(phase: str) -> None:
    async with serving() as service:
        worker = service.generators.prefill[0] if phase == "first_token" else service.generators.decode[0]
        worker.script.stall(phase)
        call = service.generation.GenerateStream(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10)
        await asyncio.wait_for(_first_read_or_phase(call, worker.script.reached(phase)), 5)
        call.cancel()
        await service.generators.assert_idle()
        assert (await service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10)).results


async def _first_read_or_phase(call: Any, reached: asyncio.Event) -> None:
    reading = asyncio.create_task(call.read())
    await reached.wait()
    await asyncio.wait({reading}, timeout=0.05)


async def test_deadline_of_the_client_is_honoured() -> None:
    async with serving() as service:
        service.generators.decode[0].script.stall("reserve")
        started = time.monotonic()
        request = generation_pb2.GenerateRequest(prompt="Hello", request_id="late")
        error = await failing(service.generation.Generate(request, timeout=0.5))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0.4 < time.monotonic() - started < 1.5
        traces = service.router._live.traces
        await until(lambda: traces.find("late").error_reason == "DEADLINE_EXCEEDED", what="the trace")


async def test_default_timeout_applies_when_the_client_sets_none() -> None:
    async with serving("--default-timeout", "0.4") as service:
        service.generators.decode[0].script.stall("reserve")
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello")))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_full_queue_refuses_early_and_says_when_to_come_back() -> None:
    async with serving("--max-live-requests", "1", "--max-queued-requests", "0") as service:
        go_on = service.generators.prefill[0].script.stall("first_token")
        first = service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10)
        await service.generators.prefill[0].script.reached("first_token").wait()
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error)["RetryInfo"].retry_delay.ToMilliseconds() > 0
        go_on.set()
        assert (await first).results


async def test_turns_are_shared_between_callers_as_the_call_names_them() -> None:
    """Without tokens, `x-caller` tells callers apart, else the host, which they all share here."""
    async with serving("--max-live-requests", "1", "--max-queued-requests", "12") as service:
        prefill = service.generators.prefill[0]
        go_on = prefill.script.stall("first_token")

        def call(request_id: str, **options: Any) -> Any:
            request = generation_pb2.GenerateRequest(prompt="Hello", request_id=request_id)
            return service.generation.Generate(request, timeout=20, **options)

        calls = [call("held")]
        await prefill.script.reached("first_token").wait()
        calls += [call(f"many-{number}") for number in range(12)]
        await until(lambda: service.router._generation_gate.queued == 12, what="a full queue")
        calls.append(call("one", metadata=(("x-caller", "one"),)))
        refused = await failing(calls[12])  # of the caller that has most of the queue, the newest
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.trailing_metadata()["grpc-retry-pushback-ms"]
        go_on.set()
        await asyncio.gather(*calls[:12], calls[13])
        assert [spec.request_id.partition("#")[0] for spec in prefill.specs][:3] == ["held", "one", "many-0"]


async def _caller_at(address: str, target: str) -> str:
    """Who a real server takes a client of `target` for."""
    seen: list[str] = []

    async def handle(request: bytes, context: Any) -> bytes:
        seen.append(caller_of(context))
        return b""

    server = grpc.aio.server()
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port(address)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(target.replace("PORT", str(port))) as channel:
            await channel.unary_unary("/test.Service/Call")(b"", timeout=10)
    finally:
        await server.stop(None)
    return seen[0]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_a_caller_without_a_name_goes_by_the_address_of_its_host(tmp_path: Path) -> None:
    assert await _caller_at("127.0.0.1:0", "127.0.0.1:PORT") == "127.0.0.1"
    if _has_ipv6():
        assert await _caller_at("[::1]:0", "[::1]:PORT") == "::1"
    path = f"unix:{tmp_path}/socket"
    assert (await _caller_at(path, path)).startswith("unix:")
    assert host_of("ipv6:%5B2001:db8::7%5D:54321") == "2001:db8::7"


async def test_priorities_count_no_more_than_the_queue_can_wait_for() -> None:
    """A level is ten seconds: within the default of 60 s, two up or down; and workers hear of no more."""
    for flags, counted in (((), 2), (("--max-queue-wait", "20"), 0), (("--max-priority", "7"), 7)):
        async with serving(*flags) as service:
            for asked in (100, -100, 1):
                request = generation_pb2.GenerateRequest(prompt="Hello", priority=asked)
                await service.generation.Generate(request, timeout=10)
            told = [spec.priority for spec in service.generators.prefill[0].specs]
            assert told == [counted, -counted, min(counted, 1)]


async def test_two_hundred_calls_fifty_at_a_time() -> None:
    async with serving(prefill=2, decode=2) as service:
        slots = asyncio.Semaphore(50)

        async def call() -> str:
            async with slots:
                request = generation_pb2.GenerateRequest(prompt="Hello", sampling=common_pb2.SamplingOptions(seed=1))
                return (await service.generation.Generate(request, timeout=20)).results[0].text

        assert len(set(await asyncio.gather(*(call() for _ in range(200))))) == 1


# --- the process ----------------------------------------------------------------------------------


def test_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_settings(
        RouterSettings, ["--workers", "a:1,b:2", "--workers", "dns:///c:3", "--log-format", "json"]
    )
    assert settings.workers == ["a:1", "b:2", "dns:///c:3"]
    monkeypatch.setenv("TWINSTAGE_WORKERS", "x:1, y:2")
    monkeypatch.setenv("TWINSTAGE_MAX_LIVE_REQUESTS", "7")
    settings = read_settings(RouterSettings, [])
    assert (settings.workers, settings.max_live_requests) == (["x:1", "y:2"], 7)
    with pytest.raises(ConfigError, match="--max-live-requests"):
        read_settings(RouterSettings, ["--max-live-requests", "0"])
    settings = read_settings(RouterSettings, ["--caller-weights", "search=2,jobs=0.5", "--caller-weights", "a=b=3"])
    assert settings.caller_weights == {"search": 2.0, "jobs": 0.5, "a=b": 3.0}
    for wrong in ("search", "=2", "search=0", "search=much"):
        with pytest.raises(ConfigError, match="--caller-weights"):
            read_settings(RouterSettings, ["--caller-weights", wrong])


@pytest.mark.parametrize("flags", [[], ["--workers", "nonsense"], ["--workers", "a:1", "--listen", "127.0.0.1:99999"]])
def test_wrong_flags_end_with_one_line_and_code_two(flags: list[str]) -> None:
    command = [sys.executable, "-m", "router", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr


async def test_port_in_use_is_said() -> None:
    async with serving() as service:
        flags = ["--listen", f"127.0.0.1:{service.router.port}", "--workers", "127.0.0.1:1"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", *flags, stderr=asyncio.subprocess.PIPE
        )
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 2
        assert b"in use" in stderr


async def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async with FakeCluster() as cluster:
        workers = [argument for address in cluster.addresses for argument in ("--workers", address)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", "--listen", "127.0.0.1:0", "--log-format", "json", *workers),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stderr is not None
            address = ""
            models_ready = 0
            while not address or models_ready < 2:
                event = json.loads(await asyncio.wait_for(process.stderr.readline(), 30))
                address = event["address"] if event["event"] == "router ready" else address
                models_ready += event["event"] == "worker ready"
            go_on = cluster.prefill[0].script.stall("first_token")
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                running = stub.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=20)
                await cluster.prefill[0].script.reached("first_token").wait()
                process.terminate()
                while json.loads(await asyncio.wait_for(process.stderr.readline(), 30))["event"] != "draining":
                    pass
                error = await failing(stub.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=20))
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                go_on.set()
                assert (await running).results
            await asyncio.wait_for(process.communicate(), 30)
            assert process.returncode == 0
            await cluster.assert_idle()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


# --- what is too much -----------------------------------------------------------------------------

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


async def test_a_client_cannot_make_the_router_run_its_template() -> None:
    chat = {"messages": [generation_pb2.ChatMessage(role="user", content="Hi")], "chat_template": ENDLESS}
    async with serving() as service:
        calls = [service.generation.Chat(generation_pb2.ChatRequest(**chat), timeout=10) for _ in range(4)]
        tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(service.channel)
        calls += [tokenizer.RenderChat(tokenizer_pb2.RenderChatRequest(**chat), timeout=10) for _ in range(40)]
        for call in calls:
            error = await failing(call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert [v.field for v in details(error)["BadRequest"].field_violations] == ["chat_template"]
        await service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10)


async def test_templates_of_trusted_clients_are_rendered() -> None:
    chat = {"messages": [generation_pb2.ChatMessage(role="user", content="Hi")], "chat_template": "say {{ 1 + 1 }}"}
    async with serving("--trust-request-chat-template") as service:
        tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(service.channel)
        assert (await tokenizer.RenderChat(tokenizer_pb2.RenderChatRequest(**chat), timeout=10)).text == "say 2"
        await service.generation.Chat(generation_pb2.ChatRequest(**chat), timeout=10)


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"prompt": "x", "sampling": {"logit_bias": dict.fromkeys(range(2000), 1000.0)}}, "sampling.logit_bias"),
        ({"prompt": "x", "stopping": {"stop_token_ids": [1] * 2000}}, "stopping.stop_token_ids"),
        ({"prompt": "x", "stopping": {"stop": ["x"] * 2000}}, "stopping.stop"),
        ({"batch": {"prompts": [{"prompt": "x"}] * 2000}}, "batch.prompts"),
    ],
)
async def test_lists_that_no_request_needs_are_refused_by_their_length(
    request_fields: dict[str, Any], field: str
) -> None:
    async with serving() as service:
        request = generation_pb2.GenerateRequest(**request_fields)
        error = await failing(service.generation.Generate(request, timeout=10))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        violations = details(error)["BadRequest"].field_violations
        assert [violation.field for violation in violations] == [field]
        assert "at most 1024 entries, has 2000" in violations[0].description


async def test_a_message_above_the_limit_is_refused() -> None:
    async with serving("--max-message-bytes", "10000") as service:
        request = generation_pb2.GenerateRequest(prompt="x" * 20_000)
        error = await failing(service.generation.Generate(request, timeout=10))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    async with serving() as service:
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="x" * 3_000_000)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "3000000 characters" in error.details()


async def test_a_large_answer_is_converted_off_the_event_loop() -> None:
    """As a message with 20 alternatives for each of a thousand tokens takes tens of milliseconds."""
    threads: list[str] = []

    def to_proto(*arguments: Any, **options: Any) -> str:
        threads.append(threading.current_thread().name)
        return "message"

    top = tuple(TokenAlternative(token_id, -1.0) for token_id in range(20))
    token = ProducedToken(token_id=1, logprobs=TokenLogprobs(logprob=-1.0, rank=1, top=top))
    model = SimpleNamespace(tokenizer=SimpleNamespace(spell=str))
    for num_tokens in (3, 1000):
        continuation = SimpleNamespace(joiner=MessageJoiner(), tokens=[token] * num_tokens, finish=None)
        answer: Any = SimpleNamespace(continuations=(continuation,), call=SimpleNamespace(model=model))
        assert await convert_answer(to_proto, answer, return_token_ids=False) == ["message"]
    assert threads[0] == threading.current_thread().name
    assert threads[1] != threads[0]
