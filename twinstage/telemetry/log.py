"""Structured logging: one event name, then keys and values; for people on a console or as JSON for machines.

Everything goes to standard error, so that standard output belongs to the program's own answers. Libraries that log
through the standard library are rendered by the same chain.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logging(*, level: LogLevel = "info", format: LogFormat = "console", role: str = "") -> None:
    """Set up logging for this process. `role` is part of every event when given."""
    shared = _shared_processors(role)
    tail: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if format == "json":
        tail += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        tail.append(_console_renderer())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=tail))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("grpc").setLevel(logging.WARNING)  # its debug output is a line a call
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger for one module: `logger.info("worker ready", address=address)`."""
    return cast(FilteringBoundLogger, structlog.stdlib.get_logger(name))


def _shared_processors(role: str) -> list[Processor]:
    def add_role(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        # Not a context variable: those do not reach the engine's and the KV channel's threads.
        if role:
            event["role"] = role
        return event

    return [
        structlog.contextvars.merge_contextvars,
        add_role,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _console_renderer() -> Processor:
    # Plain tracebacks: the rich ones print local variables, and prompts are not for the log.
    return structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
    )
