"""TokenizerService: what the router does with text, without inference. All of it runs in threads, or in processes."""

from __future__ import annotations

from typing import Any

from router.admission.conversations import check_conversation
from router.catalog import Work
from router.service.door import Door, check_model_name, check_token_count
from router.text_threads import TextThreads
from router.violations import Violations
from router.worker_entry import ServedModel
from router.workers import WorkerTable
from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.rpc.convert_public import chat_prompt_from_proto
from twinstage.text.chat_template import render_chat
from twinstage.text.template_process import TemplateProcesses
from twinstage.v1 import tokenizer_pb2, tokenizer_pb2_grpc


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Tokenize, Detokenize and RenderChat."""

    def __init__(self, workers: WorkerTable, *, door: Door, threads: TextThreads, templates: TemplateProcesses) -> None:
        self._workers = workers
        self._door = door
        self._threads = threads
        self._templates = templates

    def _model(self, name: str, work: Work | None = None) -> ServedModel:
        return self._workers.find_model(name, work=work)

    async def Tokenize(  # noqa: N802 - the names of methods are the proto's
        self, request: tokenizer_pb2.TokenizeRequest, context: Any
    ) -> tokenizer_pb2.TokenizeResponse:
        check_model_name(request.model)
        tokenizer = self._model(request.model).tokenizer
        if not request.text:
            raise InvalidRequest([FieldViolation("text", "must not be empty")])
        adds = request.add_special_tokens if request.HasField("add_special_tokens") else True

        def tokenize() -> tokenizer_pb2.TokenizeResponse:
            token_ids = tokenizer.encode(request.text, add_special_tokens=adds)
            return tokenizer_pb2.TokenizeResponse(token_ids=token_ids, tokens=map(tokenizer.token_piece, token_ids))

        return await self._threads.run(tokenize)

    async def Detokenize(  # noqa: N802
        self, request: tokenizer_pb2.DetokenizeRequest, context: Any
    ) -> tokenizer_pb2.DetokenizeResponse:
        check_model_name(request.model)
        model = self._model(request.model)
        check_token_count("token_ids", request.token_ids, model)
        violations = Violations()
        violations.check_token_ids("token_ids", request.token_ids, model.description.vocab_size)
        violations.raise_any()
        skips = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        token_ids = list(request.token_ids)
        text = await self._threads.run(lambda: model.tokenizer.decode(token_ids, skip_special_tokens=skips))
        return tokenizer_pb2.DetokenizeResponse(text=text)

    async def RenderChat(  # noqa: N802
        self, request: tokenizer_pb2.RenderChatRequest, context: Any
    ) -> tokenizer_pb2.RenderChatResponse:
        self._door.check_render(request)
        tokenizer = self._model(request.model, Work.GENERATE).tokenizer
        prompt = chat_prompt_from_proto(request)
        violations = Violations()
        check_conversation(violations, prompt)
        violations.raise_any()
        own = await self._templates.render(tokenizer.bundle, prompt) if prompt.chat_template else None

        def render() -> tokenizer_pb2.RenderChatResponse:
            text = render_chat(tokenizer.bundle, prompt) if own is None else own
            return tokenizer_pb2.RenderChatResponse(
                text=text, token_ids=tokenizer.encode(text, add_special_tokens=False)
            )

        return await self._threads.run(render)
