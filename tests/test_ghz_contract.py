"""ghz works at once, and the stand-in for it notices when it would not."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.json_format import ParseError
from grpc_reflection.v1alpha import reflection

from fake_generation import GENERATION_SERVICE, FakeGeneration, fake_server
from ghz_contract import ContractBroken, run_ghz
from twinstage.rpc.server import bind, create_server


async def test_two_hundred_calls_at_fifty_at_a_time() -> None:
    async with fake_server(FakeGeneration(seconds=0.01)) as address:
        report = await run_ghz(address)
    report.assert_kept()
    assert report.codes == {"OK": 200}
    assert report.reflection_version == "v1"
    assert GENERATION_SERVICE in report.services
    assert report.first_response is not None
    assert report.first_response["results"][0]["text"] == "Grüße, world ✓"
    assert 0.01 <= report.slowest_s <= report.elapsed_s


async def test_refusals_with_a_time_to_come_back_are_no_failures() -> None:
    async with fake_server(FakeGeneration(capacity=5, seconds=0.05)) as address:
        report = await run_ghz(address, total=100)
    report.assert_kept()
    assert report.codes["RESOURCE_EXHAUSTED"] > 0
    assert report.total == 100


async def test_other_failures_break_the_contract() -> None:
    async with fake_server(FakeGeneration()) as address:
        report = await run_ghz(address, data='{"prompt":""}', total=3, concurrency=2)
    assert report.codes == {"INVALID_ARGUMENT": 3}
    with pytest.raises(ContractBroken, match="INVALID_ARGUMENT"):
        report.assert_kept()


async def test_calls_that_exceed_the_deadline_break_the_contract() -> None:
    async with fake_server(FakeGeneration(seconds=5)) as address:
        report = await run_ghz(address, total=2, concurrency=2, timeout_s=0.2)
    with pytest.raises(ContractBroken, match="DEADLINE_EXCEEDED"):
        report.assert_kept()


async def test_json_with_an_unknown_field_is_refused_before_any_call() -> None:
    async with fake_server(FakeGeneration()) as address:
        with pytest.raises(ParseError, match="promt"):
            await run_ghz(address, data='{"promt":"Hello"}')


async def test_an_unknown_method_is_not_resolved() -> None:
    async with fake_server(FakeGeneration()) as address:
        with pytest.raises(ContractBroken, match="Nothing"):
            await run_ghz(address, call=f"{GENERATION_SERVICE}.Nothing")


async def test_without_reflection_there_is_no_contract() -> None:
    async with fake_server(FakeGeneration(), reflection=False) as address:
        with pytest.raises(ContractBroken, match="no reflection"):
            await run_ghz(address)


async def test_the_reflection_that_ships_with_grpcio_does_not_keep_it() -> None:
    """Why rpc/reflection.py exists; and the stand-in falls back to v1alpha, as ghz does."""
    server = create_server()
    reflection.enable_server_reflection([GENERATION_SERVICE], server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(ContractBroken, match=r"Generate.*\(5\)"):
            await run_ghz(f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


async def test_nobody_listening_is_an_error_within_the_dial_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ghz_contract.DIAL_TIMEOUT_S", 0.3)
    server = create_server()
    port = bind(server, "127.0.0.1:0")
    await server.start()
    await server.stop(None)
    with pytest.raises((TimeoutError, grpc.aio.AioRpcError)):
        await run_ghz(f"127.0.0.1:{port}")
