"""The public services: the only part of the router that knows protobuf and gRPC."""

from __future__ import annotations

import asyncio

import grpc.aio
from google.protobuf import descriptor_pool

from router.admission.answers import ParserChoice
from router.catalog import Work, can_do
from router.embedding import Embedding
from router.gate import Gate
from router.generation import Deadlines, Generation
from router.live import LiveRequests
from router.scoring import Scoring
from router.service.admin import AdminServicer
from router.service.door import Door
from router.service.embedding import EmbeddingServicer
from router.service.generation import GenerationServicer
from router.service.model import ModelServicer
from router.service.scoring import ScoringServicer
from router.service.tokenizer import TokenizerServicer
from router.text_threads import TextThreads
from router.workers import WorkerTable
from twinstage.rpc.callers import Right
from twinstage.rpc.health import OVERALL, HealthService
from twinstage.text.template_process import TemplateProcesses
from twinstage.v1 import (
    admin_pb2_grpc,
    embedding_pb2_grpc,
    generation_pb2_grpc,
    model_pb2_grpc,
    scoring_pb2_grpc,
    tokenizer_pb2_grpc,
)

GENERATION_SERVICE = "twinstage.v1.GenerationService"
EMBEDDING_SERVICE = "twinstage.v1.EmbeddingService"
SCORING_SERVICE = "twinstage.v1.ScoringService"
TOKENIZER_SERVICE = "twinstage.v1.TokenizerService"
MODEL_SERVICE = "twinstage.v1.ModelService"
ADMIN_SERVICE = "twinstage.v1.AdminService"
# What only looks; whatever else AdminService has, or gets, changes something for others.
ADMIN_READS = frozenset(
    f"/{ADMIN_SERVICE}/{method}" for method in ("GetServerInfo", "ListWorkers", "GetLoad", "WatchLoad", "GetTrace")
)
# Those that compute: each needs a model that can do its work.
WORK_OF_SERVICE = {GENERATION_SERVICE: Work.GENERATE, EMBEDDING_SERVICE: Work.ENCODE, SCORING_SERVICE: Work.SCORE}
SERVICE_NAMES = (*WORK_OF_SERVICE, TOKENIZER_SERVICE, MODEL_SERVICE, ADMIN_SERVICE)


def add_services(
    server: grpc.aio.Server,
    *,
    workers: WorkerTable,
    generation: Generation,
    embedding: Embedding,
    scoring: Scoring,
    generation_gate: Gate,
    embedding_gate: Gate,
    live: LiveRequests,
    draining: asyncio.Event,
    deadlines: Deadlines,
    text_threads: TextThreads,
    templates: TemplateProcesses,
    trusts_chat_templates: bool,
    parsers: ParserChoice,
) -> None:
    """Put every public service on a server that has not been started. At `draining`, streams of inputs end."""
    door = Door(trusts_chat_templates=trusts_chat_templates)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(generation, door), server)
    embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(
        EmbeddingServicer(embedding, gate=embedding_gate, deadlines=deadlines, draining=draining), server
    )
    scoring_pb2_grpc.add_ScoringServiceServicer_to_server(ScoringServicer(scoring), server)
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(
        TokenizerServicer(workers, door=door, threads=text_threads, templates=templates), server
    )
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(workers, parsers), server)
    admin = AdminServicer(
        workers, live, generation_gate=generation_gate, embedding_gate=embedding_gate, draining=draining
    )
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)


def served_methods() -> frozenset[str]:
    """Every method of the public services, as "/package.Service/Method"."""
    pool = descriptor_pool.Default()
    return frozenset(
        f"/{name}/{method.name}" for name in SERVICE_NAMES for method in pool.FindServiceByName(name).methods
    )


def right_for(method: str) -> Right:
    """The right that a caller needs for a method ("/package.Service/Method")."""
    return Right.ADMIN if method.startswith(f"/{ADMIN_SERVICE}/") and method not in ADMIN_READS else Right.USE


def update_health(health: HealthService, workers: WorkerTable) -> list[str]:
    """Say of each service whether its requests can be served now, and the same for each model: SERVICE/MODEL.

    Listing models and workers needs none of them, so ModelService and AdminService serve as soon as the router does.
    Returns the services that need workers and have them.
    """
    models = workers.models.values()
    health.set(OVERALL, any(model.ready for model in models))
    for service, work in WORK_OF_SERVICE.items():
        for model in models:
            health.set(f"{service}/{model.name}", model.ready and can_do(model, work))
    served = [
        service
        for service, work in WORK_OF_SERVICE.items()
        if any(model.ready and can_do(model, work) for model in models)
    ]
    for service in WORK_OF_SERVICE:
        health.set(service, service in served)
    health.set(TOKENIZER_SERVICE, bool(workers.models))
    health.set(MODEL_SERVICE, True)
    health.set(ADMIN_SERVICE, True)
    return served
