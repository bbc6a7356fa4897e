"""A server's prefill: one completion of one token, by OpenAI's protocol."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

from bench.engines.client import EngineFailed
from bench.engines.protocol import Prompts
from bench.loading import MODEL
from bench.peers.servers import PeerServer

_LIMIT_S = 120.0


class ServedPrefill:
    """Takes part in a contest of prefill. The server belongs to somebody else."""

    def __init__(self, server: PeerServer, *, version: str) -> None:
        self._server = server
        self.name = server.name
        self.versions = {server.name.split()[0]: version}
        self._url = f"{server.address}/v1/completions"
        self._prompts = Prompts()

    def prefill(self, tokens: int) -> float:
        """Seconds from a new prompt to the answer. Raises EngineFailed."""
        body = {"model": MODEL, "prompt": self._prompts.next(tokens), "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            self._url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        started_s = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=_LIMIT_S) as response:
                usage = json.load(response)["usage"]
        except (urllib.error.URLError, OSError, KeyError, ValueError) as error:
            raise EngineFailed(f"{self.name} does not answer: {error}") from error
        seconds = time.perf_counter() - started_s
        if usage["prompt_tokens"] != tokens:
            raise EngineFailed(f"{self.name} counts {usage['prompt_tokens']} tokens in a prompt of {tokens}")
        return seconds

    def decode(self, *, batch: int, context: int, steps: int) -> float:
        raise EngineFailed(f"{self.name} is a server: its steps cannot be counted from outside")

    def pause(self) -> None:
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()

    def close(self) -> None:
        pass
