"""ModelService: the models that workers have announced."""

from __future__ import annotations

from typing import Any

from router.admission.answers import ParserChoice
from router.admission.capabilities import capabilities_of
from router.service.door import check_model_name
from router.worker_entry import ServedModel
from router.workers import WorkerTable
from twinstage.rpc.convert_public import model_to_proto
from twinstage.v1 import model_pb2, model_pb2_grpc


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """ListModels and GetModel."""

    def __init__(self, workers: WorkerTable, parsers: ParserChoice) -> None:
        """`parsers` read the answers of models."""
        self._workers = workers
        self._parsers = parsers

    async def ListModels(  # noqa: N802 - the names of methods are the proto's
        self, request: model_pb2.ListModelsRequest, context: Any
    ) -> model_pb2.ListModelsResponse:
        models = self._workers.models
        return model_pb2.ListModelsResponse(models=[self._to_proto(models[name]) for name in sorted(models)])

    async def GetModel(  # noqa: N802
        self, request: model_pb2.GetModelRequest, context: Any
    ) -> model_pb2.GetModelResponse:
        check_model_name(request.name, field="name")
        model = self._workers.find_model(request.name, work=None, field="name")
        return model_pb2.GetModelResponse(model=self._to_proto(model))

    def _to_proto(self, model: ServedModel) -> model_pb2.Model:
        return model_to_proto(
            model.description,
            prefill_workers=len(model.prefill),
            decode_workers=len(model.decode),
            ready=model.ready,
            deterministic=bool(model.pairing.numerics),
            capabilities=[capability.value for capability in capabilities_of(model, self._parsers)],
        )
