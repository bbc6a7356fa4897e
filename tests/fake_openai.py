"""A server with OpenAI's completions API and no model, over real HTTP/1.1, as vLLM and llama.cpp's server stream it.

async with FakeOpenAi() as server:
    ... server.address, server.requests
"""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any, Self


class FakeOpenAi:
    """Answers with `max_tokens` tokens, `tokens_per_event` in each event; breaks in the ways that tests ask for.

    `counts` is how an event says its tokens where it is asked to: "ids", "usage" (vLLM) or "timings" (llama.cpp's
    server). `silent_every` events have tokens and no text.
    """

    def __init__(
        self, *, tokens_per_event: int = 1, counts: str = "", silent_every: int = 0, has_tokenize: bool = True
    ) -> None:
        self.address = ""
        self.requests: list[dict[str, Any]] = []
        self.status = 200
        self.breaks_off = False
        self.hangs = False
        self.model: dict[str, Any] = {"id": "m", "max_model_len": 400}
        self.slot_context: int | None = None
        self.is_chunked = True
        self._tokens_per_event = tokens_per_event
        self._counts = counts
        self._silent_every = silent_every
        self.tokenize_path = "/tokenize" if has_tokenize else ""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.splitlines()[0].split()
        headers = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if line)
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"null")
        try:
            if (method, path) == ("POST", "/v1/completions"):
                await self._complete(body, writer)
            else:
                status, value = self._look_up(method, path, body)
                self._whole(writer, status, value)
            await writer.drain()
        finally:
            writer.close()

    def _look_up(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path:
            case "GET", "/v1/models":
                return 200, {"data": [self.model]}
            case "GET", "/props" if self.slot_context is not None:
                return 200, {"default_generation_settings": {"n_ctx": self.slot_context}}
            case "POST", self.tokenize_path:
                return 200, {"tokens": [1, *range(len(body["content"].split()))]}
        return 404, {"error": {"message": "no such path", "type": "not_found"}}

    def _whole(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.requests.append(body)
        if self.hangs:
            await asyncio.sleep(30)
        if self.status != 200:
            self._whole(writer, self.status, {"error": {"message": "too many", "type": "overloaded"}})
            return
        coding = b"Transfer-Encoding: chunked\r\n" if self.is_chunked else b""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + coding + b"\r\n")
        total = body["max_tokens"]
        for number, start in enumerate(range(0, total, self._tokens_per_event), start=1):
            self._event(writer, self._some_tokens(body, number, start, min(self._tokens_per_event, total - start)))
            await asyncio.sleep(0.001)
        if self.breaks_off:
            return
        prompt = body["prompt"]
        prompt_tokens = 1 + len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": total, "total_tokens": prompt_tokens + total}
        self._event(writer, {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 2}}})
        self._event(writer, {"choices": [], "timings": {"prompt_ms": 12.5, "predicted_ms": 50}})
        self._event(writer, None)

    def _some_tokens(self, body: dict[str, Any], number: int, start: int, count: int) -> dict[str, Any]:
        is_silent = self._silent_every and number % self._silent_every == 0
        choice: dict[str, Any] = {"index": 0, "text": "" if is_silent else " x" * count, "finish_reason": None}
        event: dict[str, Any] = {"choices": [choice]}
        if self._counts == "ids":
            choice["token_ids"] = list(range(count))
        if self._counts == "usage" and body["stream_options"].get("continuous_usage_stats"):
            event["usage"] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": start + count}
        if self._counts == "timings" and body.get("timings_per_token"):
            event["timings"] = {"prompt_ms": 12.5, "predicted_ms": 50, "predicted_n": start + count}
        return event

    def _event(self, writer: asyncio.StreamWriter, value: Any) -> None:
        """One event; chunked, it is cut in the middle, as a proxy might do."""
        data = b"data: %s\n\n" % (b"[DONE]" if value is None else json.dumps(value).encode())
        if not self.is_chunked:
            writer.write(data)
            return
        for part in (data[:9], data[9:]):
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
        if value is None:
            writer.write(b"0\r\n\r\n")
