"""How processes end: at the first signal in order, at the second one at once, and in any case."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fake_workers import FakeCluster, FakePrefill, make_bundle, make_model
from twinstage.types import Task
from twinstage.v1 import (
    embedding_pb2,
    embedding_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

ROOT = Path(__file__).resolve().parent.parent
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LONG_S = 60  # nothing here may take so long; the grace period that is not waited for

SERVER = """
import asyncio, sys, threading, time
from twinstage.rpc.health import HealthService
from twinstage.rpc.server import bind, create_server, run_until_signalled
from twinstage.telemetry.process import end_within, stop_at_once_while_starting

async def main(phase):
    server, health = create_server(), HealthService()
    bind(server, "127.0.0.1:0")
    await server.start()

    async def drain():
        print("drain", flush=True)
        if phase == "drain":
            await asyncio.sleep(60)
        if phase == "held up":
            time.sleep(60)

    run = asyncio.create_task(run_until_signalled(server, health, grace_s=60, on_drain=drain))
    await asyncio.sleep(0)
    print("ready", flush=True)
    await run
    if phase == "bounded":
        end_within(0.2, exit_code=3)
    print("stopped", flush=True)

stop_at_once_while_starting()
print("starting", flush=True)
if sys.argv[1] == "starting":
    time.sleep(60)
asyncio.run(main(sys.argv[1]))
threading.Thread(target=time.sleep, args=(60,)).start()  # one that cannot be interrupted
"""


@contextlib.contextmanager
def server(phase: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, phase], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until_it_says(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"it ended with {process.wait(10)} before it said {word!r}")


@pytest.mark.parametrize(
    ("phase", "said"), [("drain", "drain"), ("held up", "drain"), ("joining", "stopped")], ids=lambda value: value
)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_a_process_at_once(phase: str, said: str, second: signal.Signals) -> None:
    with server(phase) as process:
        until_it_says(process, "ready")
        process.terminate()
        until_it_says(process, said)
        process.send_signal(second)
        assert process.wait(20) == 128 + second


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_process_starts_ends_it(number: signal.Signals) -> None:
    with server("starting") as process:
        until_it_says(process, "starting")
        process.send_signal(number)
        assert process.wait(20) == 0


def test_threads_are_waited_for_no_longer_than_allowed() -> None:
    with server("bounded") as process:
        until_it_says(process, "ready")
        process.terminate()
        assert process.wait(20) == 3


# --- the router ---------------------------------------------------------------------------------------


@dataclass
class RouterProcess:
    """A router's process with a generation model, `fake`, and an embedding model, `embedder`."""

    process: asyncio.subprocess.Process
    prefill: FakePrefill
    embedder: FakePrefill
    channel: grpc.aio.Channel

    async def until_it_logs(self, event: str) -> dict[str, Any]:
        return await _logged(self.process, event)

    async def end(self) -> int:
        """Tell it to stop; the exit code. Raises TimeoutError long before the grace period is over."""
        self.process.terminate()
        async with asyncio.timeout(LONG_S / 3):
            await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode


async def _logged(process: asyncio.subprocess.Process, event: str) -> dict[str, Any]:
    assert process.stderr is not None
    async with asyncio.timeout(LONG_S):
        while True:
            found: dict[str, Any] = json.loads(await process.stderr.readline())
            if found["event"] == event:
                return found


@contextlib.asynccontextmanager
async def router(*flags: str) -> AsyncIterator[RouterProcess]:
    model = make_model(name="embedder", task=Task.EMBED, bundle=make_bundle())
    async with FakeCluster() as generators, FakeCluster(decode=0, model=model, prefix="embed-") as embedders:
        addresses = [*generators.addresses, *embedders.addresses]
        workers = [argument for address in addresses for argument in ("--workers", address)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", "--listen", "127.0.0.1:0", "--log-format", "json", *workers, *flags),
            *("--drain-timeout", str(LONG_S)),
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            address = (await _logged(process, "router ready"))["address"]
            for _ in addresses:
                await _logged(process, "worker ready")
            async with grpc.aio.insecure_channel(address) as channel:
                yield RouterProcess(process, generators.prefill[0], embedders.prefill[0], channel)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


async def end_of(stream: Any) -> grpc.StatusCode:
    """The status of a stream that has no more to say."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    return caught.value.code()


async def test_streams_that_only_stay_open_do_not_hold_a_router_up() -> None:
    async with router() as run:
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(run.channel).ServerReflectionInfo()
        await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await reflection.read()
        inputs: Any = embedding_pb2_grpc.EmbeddingServiceStub(run.channel).EncodeStream()
        await inputs.write(embedding_pb2.EncodeStreamRequest(input=embedding_pb2.EncodeInput(text="ab")))
        await inputs.read()
        assert await run.end() == 0
        for stream in (reflection, inputs):
            assert await end_of(stream) is grpc.StatusCode.UNAVAILABLE


async def test_an_input_that_was_read_is_answered_before_its_stream_ends() -> None:
    async with router() as run:
        go_on = run.embedder.script.stall("encode")
        inputs: Any = embedding_pb2_grpc.EmbeddingServiceStub(run.channel).EncodeStream()
        await inputs.write(embedding_pb2.EncodeStreamRequest(input=embedding_pb2.EncodeInput(text="ab")))
        await run.embedder.script.reached("encode").wait()
        run.process.terminate()
        await run.until_it_logs("draining")
        go_on.set()
        assert (await inputs.read()).embedding.prompt_tokens == 2
        assert await end_of(inputs) is grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(LONG_S / 3):
            await run.process.communicate()


async def test_a_template_without_an_end_does_not_hold_a_router_up() -> None:
    async with router("--trust-request-chat-template", "--tokenizer-threads", "1") as run:
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(run.channel)
        request = tokenizer_pb2.RenderChatRequest(
            model="fake", messages=[generation_pb2.ChatMessage(role="user", content="x")], chat_template=ENDLESS
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.RenderChat(request, timeout=0.5)
        assert await run.end() == 0


async def test_a_router_that_was_stopped_and_goes_on_listens_to_every_signal() -> None:
    async with router() as run:
        run.prefill.script.stall("first_token")
        stub: Any = generation_pb2_grpc.GenerationServiceStub(run.channel)
        call = stub.Generate(generation_pb2.GenerateRequest(model="fake", prompt="ab"), timeout=LONG_S)
        await run.prefill.script.reached("first_token").wait()
        run.process.send_signal(signal.SIGSTOP)
        run.process.send_signal(signal.SIGCONT)
        run.process.terminate()
        await run.until_it_logs("draining")
        assert await run.end() == 128 + signal.SIGTERM
        with pytest.raises(grpc.aio.AioRpcError):
            await call
