"""Which model a request means."""

from __future__ import annotations

from collections.abc import Mapping

from router.worker_entry import ServedModel
from twinstage.errors import FieldViolation, InvalidRequest, NotFound, NoWorker, TaskNotSupported
from twinstage.types import Task

_TASK_WORDS = {
    Task.GENERATE: "generate text",
    Task.EMBED: "embed",
    Task.SCORE: "score pairs",
    Task.CLASSIFY: "classify",
}


def find_model(models: Mapping[str, ServedModel], name: str, *, task: Task | None) -> ServedModel:
    """The model of that name that can do `task`; an empty name means the only one that can.

    Raises NotFound, TaskNotSupported, InvalidRequest (the name is needed), NoWorker (no model was announced yet).
    """
    if name:
        model = models.get(name)
        if model is None:
            raise NotFound(
                f"model {name!r} is not served here; served: {_names(models)}",
                resource_type="model",
                resource_name=name,
            )
        if task is not None and model.description.task is not task:
            raise TaskNotSupported(f"model {name!r} cannot {_TASK_WORDS[task]}; choose another model")
        return model
    able = {name: model for name, model in models.items() if task is None or model.description.task is task}
    if len(able) == 1:
        return next(iter(able.values()))
    if able:
        raise InvalidRequest([FieldViolation("model", f"several models are served; name one of {_names(able)}")])
    if models and task is not None:
        raise TaskNotSupported(f"no model that can {_TASK_WORDS[task]} is served; served: {_names(models)}")
    raise NoWorker("no worker has announced a model yet; try again")


def _names(models: Mapping[str, ServedModel]) -> str:
    return ", ".join(sorted(models)) or "none"
