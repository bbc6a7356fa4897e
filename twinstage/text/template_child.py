"""The process in which one template of a request is rendered; see `template_process`, which starts it."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from twinstage.errors import InvalidRequest
from twinstage.text.chat_template import Rendering, run

_MAX_OPEN_FILES = 16


def main() -> None:
    """Render the task on standard input; the answer goes to standard output."""
    task = json.loads(sys.stdin.buffer.read())
    _limit_this_process(cpu_s=task.pop("cpu_s"), memory_bytes=task.pop("memory_bytes"))
    try:
        answer: dict[str, Any] = {"text": run(Rendering(**task))}
    except InvalidRequest as error:
        answer = {"violations": [{"field": item.field, "description": item.description} for item in error.violations]}
    sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode(errors="replace"))


def _limit_this_process(*, cpu_s: int, memory_bytes: int) -> None:
    """Limits that hold from here on; the template has not been looked at."""
    for what, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),
    ):
        _, hard = resource.getrlimit(what)
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        # At the soft limit comes SIGXCPU, by which the end is recognized; at the hard one SIGKILL.
        later = what == resource.RLIMIT_CPU and (hard == resource.RLIM_INFINITY or allowed < hard)
        resource.setrlimit(what, (allowed, allowed + 1 if later else allowed))


if __name__ == "__main__":
    main()
