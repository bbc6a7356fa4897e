"""A Twinstage router as the target of a load run."""

from __future__ import annotations

from twinstage.bench.target import Answer, LoadRequest, RequestFailed, ServedModel, TokenSink
from twinstage.client import AsyncTwinstageClient, Options, Output, Stopping, Summary
from twinstage.errors import ConfigError, TwinstageError
from twinstage.rpc.access import OPEN_ACCESS, Access
from twinstage.rpc.status import code_of
from twinstage.types import Task, TextPrompt, TokenPrompt

_OUTPUT = Output(return_token_ids=True)  # so that each delta says how many tokens it holds


class TwinstageTarget:
    """Speaks twinstage.v1 by way of the SDK."""

    def __init__(self, address: str, access: Access = OPEN_ACCESS) -> None:
        self._address = address
        self._client = AsyncTwinstageClient(
            address,
            credentials=access.credentials,
            token=access.token,
            server_name=access.server_name,
            retries=0,  # a refusal is a result
        )

    @property
    def address(self) -> str:
        return self._address

    async def model(self, name: str) -> ServedModel:
        models = [model for model in await self._client.models() if model.task is Task.GENERATE]
        names = ", ".join(sorted(model.name for model in models)) or "none"
        found = [model for model in models if name in ("", model.name)]
        if len(found) != 1:
            problem = f"no generation model {name!r} is served" if name else f"{len(models)} of them are served"
            raise ConfigError(f"--model: {problem} at {self._address}; pass the name of one (served: {names})")
        return ServedModel(
            name=found[0].name, max_model_len=found[0].max_model_len, vocabulary_size=found[0].vocab_size
        )

    async def count_tokens(self, text: str, model: str) -> int:
        return len(await self._client.tokenize(text, model=model))

    async def send(self, request: LoadRequest, sink: TokenSink) -> Answer:
        prompt = (
            TextPrompt(text=request.prompt)
            if isinstance(request.prompt, str)
            else TokenPrompt(token_ids=tuple(request.prompt))
        )
        try:
            async with self._client.generate_stream(prompt, _options(request)) as stream:
                async for delta in stream:
                    sink.tokens(len(delta.token_ids))
                return _answer(stream.summary)
        except TwinstageError as error:
            raise RequestFailed(str(error), code=code_of(error).name, reason=error.reason) from error

    async def close(self) -> None:
        await self._client.close()


def _options(request: LoadRequest) -> Options:
    return Options(
        model=request.model,
        sampling=request.sampling,
        stopping=Stopping(max_tokens=request.output_tokens, ignore_eos=request.ignore_eos),
        output=_OUTPUT,
        timeout_s=request.timeout_s,
    )


def _answer(summary: Summary | None) -> Answer:
    assert summary is not None  # a stream without one has raised
    usage, timing, placement = summary.usage, summary.timing, summary.placement
    return Answer(
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        kv_bytes=placement.kv_bytes,
        retries=placement.retries,
        phases_s={
            "queue": timing.queue_s,
            "tokenize": timing.tokenize_s,
            "prefill": timing.prefill_s,
            "kv_transfer": timing.kv_transfer_s,
            "time_to_first_token": timing.time_to_first_token_s,
            "decode": timing.decode_s,
            "total": timing.total_s,
        },
    )
