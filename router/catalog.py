"""Which model a request means."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from router.worker_entry import ServedModel
from twinstage.errors import FieldViolation, InvalidRequest, NotFound, NoWorker, TaskNotSupported
from twinstage.types import Task


class Work(enum.Enum):
    """What a request wants of a model, in words."""

    GENERATE = "generate text"
    ENCODE = "encode single texts"
    EMBED = "embed"
    CLASSIFY = "classify"
    SCORE = "score"


_DONE_BY = {
    Work.GENERATE: {Task.GENERATE},
    Work.ENCODE: {Task.EMBED, Task.CLASSIFY},
    Work.EMBED: {Task.EMBED},
    Work.CLASSIFY: {Task.CLASSIFY},
    Work.SCORE: {Task.EMBED, Task.SCORE},
}


def can_do(model: ServedModel, work: Work) -> bool:
    """Whether the model is of a kind that does this."""
    return model.description.task in _DONE_BY[work]


def check_can_do(model: ServedModel, work: Work) -> None:
    """Raises TaskNotSupported."""
    if not can_do(model, work):
        raise TaskNotSupported(f"model {model.name!r} cannot {work.value}; choose another model")


def find_model(
    models: Mapping[str, ServedModel],
    name: str,
    *,
    work: Work | None,
    field: str = "model",
    unheard: Sequence[str] = (),
) -> ServedModel:
    """The model of that name that can do `work`; an empty name means the only one that can. `field` has the name.

    `unheard` are the addresses of workers that have not said yet what they serve: it may be what is asked for.
    Raises NotFound, TaskNotSupported, InvalidRequest (the name is needed), NoWorker (it was not announced yet).
    """
    if name:
        model = models.get(name)
        if model is None:
            _check_all_heard(f"model {name!r} is not served by those that have", unheard)
            raise NotFound(
                f"model {name!r} is not served here; served: {_names(models)}",
                resource_type="model",
                resource_name=name,
            )
        if work is not None:
            check_can_do(model, work)
        return model
    able = {name: model for name, model in models.items() if work is None or can_do(model, work)}
    if len(able) == 1:
        return next(iter(able.values()))
    if able:
        raise InvalidRequest([FieldViolation(field, f"several models are served; name one of {_names(able)}")])
    if models and work is not None:
        _check_all_heard(f"none of those that have can {work.value}", unheard)
        raise TaskNotSupported(f"no model that can {work.value} is served; served: {_names(models)}")
    raise NoWorker("no worker has announced a model yet; try again")


def _check_all_heard(missing: str, unheard: Sequence[str]) -> None:
    """Raises NoWorker: a router that has just started, or a worker that starts, is no reason to look elsewhere."""
    if unheard:
        raise NoWorker(f"{', '.join(unheard[:3])} did not announce a model yet, and {missing}; try again")


def _names(models: Mapping[str, ServedModel]) -> str:
    return ", ".join(sorted(models)) or "none"
