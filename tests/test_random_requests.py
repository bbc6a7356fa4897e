"""Some hundred random requests to a real cluster; `make random-requests` sends 10,000."""

from __future__ import annotations

import asyncio

import pytest

from harness import ProcessCluster
from random_requests.cases import spare_xgrammar
from random_requests.run import ALL_METHODS, draw, methods_of, send_all

pytestmark = pytest.mark.xdist_group("tiny")

REQUESTS = 300


def test_random_requests_are_answered_and_leave_nothing_behind(tiny_cluster: ProcessCluster) -> None:
    tiny_cluster.wait_idle()
    found = draw(REQUESTS, seed_number=1)
    assert methods_of(found) == ALL_METHODS
    for case in found:
        spare_xgrammar(case)
    report = asyncio.run(send_all(tiny_cluster.address, found))
    assert not report.problems, "\n".join(report.problems)
    assert sum(report.codes.values()) == len(found) >= REQUESTS
    assert report.served > REQUESTS / 20, report  # so that not all of them were refused at the door
    tiny_cluster.wait_idle()
    assert not any(worker.leaked_kv_blocks for worker in tiny_cluster.workers())
