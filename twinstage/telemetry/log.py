"""Structured logging: one event name, then keys and values; for people on a console or as JSON for machines.

Everything goes to standard error, so that standard output belongs to the program's own answers. Libraries that log
through the standard library are rendered by the same chain.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_SHARED: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.StackInfoRenderer(),
)


def configure_logging(*, level: LogLevel = "info", format: LogFormat = "console", role: str = "") -> None:
    """Set up logging for this process. `role` is bound to every event when given."""
    tail: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if format == "json":
        tail += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        tail.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=list(_SHARED), processors=tail))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    if role:
        structlog.contextvars.bind_contextvars(role=role)


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger for one module: `logger.info("worker ready", address=address)`."""
    return cast(FilteringBoundLogger, structlog.stdlib.get_logger(name))
