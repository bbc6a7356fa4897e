"""A server with OpenAI's completions API as the target of a load run: vLLM, llama.cpp's server and others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from twinstage.bench.http_stream import Endpoint, HttpError, Response, http_request
from twinstage.bench.target import Answer, LoadRequest, RequestFailed, ServedModel, TokenSink
from twinstage.client.options import Sampling
from twinstage.errors import ConfigError, DeadlineExceeded, Unavailable

_ADMIN_TIMEOUT_S = 30.0
_DONE = b"[DONE]"
_TOKENIZE_PATHS = ("/tokenize", "/extras/tokenize")
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")


class OpenAiTarget:
    """Speaks /v1/completions, streamed. A connection of its own for each request, made as part of it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._endpoint = Endpoint.parse(address)

    @property
    def address(self) -> str:
        return self._address

    async def model(self, name: str) -> ServedModel:
        """From /v1/models: vLLM says the context's length there, llama.cpp's server that and the vocabulary's size."""
        status, answer = await self._ask("GET", "/v1/models")
        models = answer.get("data", []) if isinstance(answer, dict) else []
        models = [model for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)]
        if status != 200 or not models:
            raise ConfigError(f"{self._address} answers /v1/models with {status}; is it an OpenAI-compatible server?")
        found = [model for model in models if name in ("", model["id"])]
        names = ", ".join(model["id"] for model in models)
        if len(found) != 1:
            problem = f"no model {name!r} is served" if name else f"{len(models)} models are served"
            raise ConfigError(f"--model: {problem} at {self._address}; pass the name of one (served: {names})")
        details = found[0].get("meta")
        details = details if isinstance(details, dict) else {}
        context = _count(found[0].get("max_model_len")) or _count(details.get("n_ctx"))
        return ServedModel(
            name=found[0]["id"],
            max_model_len=context or await self._context_of_slots(),
            vocabulary_size=_count(details.get("n_vocab")),
        )

    async def count_tokens(self, text: str, model: str) -> int:
        """By /tokenize with the text as `prompt` (vLLM) or `content` (llama.cpp), or llama-cpp-python's path."""
        request = {"model": model, "prompt": text, "content": text, "input": text, "add_special": True}
        for path in _TOKENIZE_PATHS:
            status, answer = await self._ask("POST", path, request)
            tokens = answer.get("tokens") if isinstance(answer, dict) else None
            if status == 200 and isinstance(tokens, list):
                return len(tokens)
        raise ConfigError(
            f"{self._address} has no /tokenize (status {status}), so no text of an exact length can be made; "
            "send token ids instead: --prompt-form ids --vocabulary-size N"
        )

    async def send(self, request: LoadRequest, sink: TokenSink) -> Answer:
        body = json.dumps(_completion(request)).encode()
        try:
            async with (
                asyncio.timeout(request.timeout_s),
                http_request(self._endpoint, "POST", "/v1/completions", body=body) as response,
            ):
                if response.status != 200:
                    raise _refused(response.status, await response.body())
                return await _read_stream(response, sink)
        except TimeoutError as error:
            raise RequestFailed(f"no answer within {request.timeout_s:g} s", code="TIMEOUT") from error
        except OSError as error:
            raise RequestFailed(f"{self._address}: {error}", code="CONNECTION", reason=type(error).__name__) from error
        except HttpError as error:
            raise RequestFailed(str(error), code="BROKEN") from error

    async def close(self) -> None:
        """Nothing stays open between requests."""

    async def _context_of_slots(self) -> int | None:
        """The context of one slot of an older llama.cpp server; None where there is no such thing."""
        status, answer = await self._ask("GET", "/props")
        settings = answer.get("default_generation_settings") if status == 200 and isinstance(answer, dict) else None
        return _count(settings.get("n_ctx")) if isinstance(settings, dict) else None

    async def _ask(self, method: str, path: str, value: Any = None) -> tuple[int, Any]:
        """Status and JSON of an answer; its JSON is None where it has none."""
        body = None if value is None else json.dumps(value).encode()
        try:
            async with (
                asyncio.timeout(_ADMIN_TIMEOUT_S),
                http_request(self._endpoint, method, path, body=body) as response,
            ):
                text = await response.body()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._address} does not answer {path} within {_ADMIN_TIMEOUT_S:g} s") from error
        except (OSError, HttpError) as error:
            raise Unavailable(f"no HTTP server answers at {self._address} ({error}); check the address") from error
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, None


def _completion(request: LoadRequest) -> dict[str, Any]:
    """The request's body. `ignore_eos` and ids as the prompt are extensions that vLLM and llama.cpp share.

    So that every event says how many tokens there are until it, vLLM (and SGLang) is asked for running usage, and
    llama.cpp's server for timings: an event may have tokens and no text, when they end within a character, or text of
    several tokens.
    """
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    return {
        "model": request.model,
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "timings_per_token": True,
        "ignore_eos": request.ignore_eos,
        **_sampling(request.sampling),
    }


def _sampling(sampling: Sampling) -> dict[str, Any]:
    given = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS}
    return {name: value for name, value in given.items() if value is not None}


async def _read_stream(response: Response, sink: TokenSink) -> Answer:
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    received = 0
    is_done = False
    async for data in response.events():
        if data == _DONE:
            is_done = True
            break
        event = _event(data)
        count = _tokens_in(event, received)
        sink.tokens(count)
        received += count
        usage = event.get("usage") or usage
        timings = event.get("timings") or timings
    if not is_done:
        raise RequestFailed("the stream ended before its end was announced", code="BROKEN")
    return _answer(usage, timings)


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise RequestFailed(f"an event is not JSON: {data[:80]!r}", code="BROKEN") from None
    if not isinstance(event, dict):
        raise RequestFailed(f"an event is not an object: {data[:80]!r}", code="BROKEN")
    if "error" in event:
        raise _refused(200, data)
    return event


def _tokens_in(event: dict[str, Any], received: int) -> int:
    """How many tokens an event brings after the `received` ones: by the ids it lists, or its running count.

    A server that says neither is taken to send one with each text; its usage at the end corrects the number.
    """
    choices = event.get("choices") or ()
    if not choices or not isinstance(choices[0], dict):
        return 0
    token_ids = choices[0].get("token_ids")
    if isinstance(token_ids, list):
        return len(token_ids)
    running = [
        _count(part.get(name)) if isinstance(part := event.get(kind), dict) else None
        for kind, name in (("usage", "completion_tokens"), ("timings", "predicted_n"))
    ]
    until_now = next((count for count in running if count is not None), None)
    if until_now is not None:
        return max(0, until_now - received)
    return int(bool(choices[0].get("text")))


def _answer(usage: dict[str, Any], timings: dict[str, Any]) -> Answer:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else timings.get("cache_n")
    phases = {"prefill": timings.get("prompt_ms"), "decode": timings.get("predicted_ms")}
    return Answer(
        prompt_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
        cached_prompt_tokens=_count(cached) or 0,
        phases_s={name: value / 1000 for name, value in phases.items() if isinstance(value, (int, float))},
    )


def _refused(status: int, body: bytes) -> RequestFailed:
    """What an error's body says: {"error": {"message", "type"}}, or vLLM's older {"message", "type"}."""
    message, reason = body[:300].decode(errors="replace"), ""
    try:
        value = json.loads(body)
        error = value.get("error", value) if isinstance(value, dict) else value
    except ValueError:
        error = None
    if isinstance(error, dict):
        message, reason = str(error.get("message", message)), str(error.get("type", ""))
    return RequestFailed(message, code=f"HTTP {status}", reason=reason)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
