"""TLS, tokens and secrets on real processes: nobody without the right gets in, on any port."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from harness import ProcessCluster
from router.config import RouterSettings
from twinstage.cli.access_flags import AccessFlags
from twinstage.cli.main import main
from twinstage.client import AsyncTwinstageClient, Options, Stopping, TwinstageClient, tls_credentials
from twinstage.errors import ConfigError, PermissionDenied, Unauthenticated, Unavailable
from twinstage.rpc import reloaded
from twinstage.rpc.access import Access
from twinstage.rpc.server import bind, create_server
from twinstage.rpc.server_tls import server_credentials
from twinstage.rpc.tls import TlsFiles
from twinstage.settings import read_settings
from twinstage.worker.v1 import worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.xdist_group("security")  # else each test process would start the cluster

TOKEN, ADMIN_TOKEN, SECRET = "search-token-0123456789", "operator-token-0123456789", "between-us-0123456789"
SHORT = Options(stopping=Stopping(max_tokens=3), timeout_s=30)


@dataclass(frozen=True)
class Certificates:
    """Files of one CA: a certificate for 127.0.0.1, one for workers of another name, one for clients."""

    directory: Path
    ca: Path = field(init=False)

    def __post_init__(self) -> None:
        authority = trustme.CA()
        object.__setattr__(self, "ca", self.directory / "ca.pem")
        authority.cert_pem.write_to_path(str(self.ca))
        for name, identity in (("server", "127.0.0.1"), ("worker", "worker.internal"), ("client", "client.internal")):
            issued = authority.issue_cert(identity)
            issued.private_key_pem.write_to_path(str(self.key(name)))
            for certificate in issued.cert_chain_pems:
                certificate.write_to_path(str(self.certificate(name)), append=True)

    def certificate(self, name: str) -> Path:
        return self.directory / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self.directory / f"{name}.key"

    def flags(self, name: str, prefix: str = "--tls-") -> tuple[str, ...]:
        return (f"{prefix}certificate", str(self.certificate(name)), f"{prefix}key", str(self.key(name)))


class SecureCluster(ProcessCluster):
    """A cluster whose router wants TLS and a token."""

    access: Access

    @contextlib.contextmanager
    def channel(self) -> Iterator[Any]:  # type: ignore[override]
        with self.access.open(self.address, ()) as channel:
            yield self.access.authorized(channel)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of a CA that nobody here trusts."""
    return Certificates(tmp_path_factory.mktemp("strangers"))


@pytest.fixture(scope="module")
def cluster(
    prepared_tiny_model: Path, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecureCluster]:
    directory = tmp_path_factory.mktemp("secure-cluster")
    tokens, secret = directory / "tokens", directory / "secret"
    tokens.write_text(f"search {TOKEN}\noperations {ADMIN_TOKEN} use,admin\n")
    secret.write_text(SECRET)
    with SecureCluster(directory) as cluster:
        cluster.access = Access(credentials=tls_credentials(certificates.ca), token=TOKEN)
        asks = ("--tls-client-ca", str(certificates.ca), "--worker-secret-file", str(secret))
        kv = ("--kv-secret-file", str(secret), "--kv-cache-bytes", "8MiB", "--weights", "fp32")
        tls = (
            "--kv-transports",
            "tcp",
            *certificates.flags("worker", "--kv-tls-"),
            "--kv-tls-ca",
            str(certificates.ca),
        )
        cluster.start_workers(str(prepared_tiny_model), flags=(*certificates.flags("worker"), *asks, *kv, *tls))
        shows = ("--worker-tls-ca", str(certificates.ca), "--worker-tls-name", "worker.internal")
        cluster.start_router(
            *certificates.flags("server"),
            *certificates.flags("client", "--worker-tls-"),
            *shows,
            "--worker-secret-file",
            str(secret),
            "--tokens-file",
            str(tokens),
        )
        yield cluster


def _client(cluster: SecureCluster, ca: Path | None, token: str) -> TwinstageClient:
    return TwinstageClient(cluster.address, credentials=tls_credentials(ca) if ca else None, token=token)


async def test_who_has_the_ca_and_a_token_is_served(cluster: SecureCluster, certificates: Certificates) -> None:
    with _client(cluster, certificates.ca, TOKEN) as client:
        expected = client.generate("Hello", SHORT)
        assert expected.summary.placement.transport == "tcp"
        assert {worker.transports for worker in client.workers()} == {("tls",)}
    async with AsyncTwinstageClient(
        cluster.address, credentials=tls_credentials(certificates.ca), token=TOKEN
    ) as asynchronous:
        assert (await asynchronous.generate("Hello", SHORT)).summary.usage == expected.summary.usage


def test_commands_show_both(
    cluster: SecureCluster, certificates: Certificates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    flags = ["--address", cluster.address, "--tls-ca", str(certificates.ca)]
    _run(["generate", "Hello", "--max-tokens", "3", *flags, "--token-file", str(token_file)])
    assert "tcp" in capsys.readouterr().err
    load = ["--concurrency", "1", "--requests", "2", "--prompt-tokens", "4", "--output-tokens", "2"]
    _run(["bench", *load, *flags, "--token-file", str(token_file), "--json", str(tmp_path / "report.json")])
    report = (tmp_path / "report.json").read_text()
    assert '"requests"' in report
    assert TOKEN not in report
    capsys.readouterr()
    _run(["health", *flags])
    assert capsys.readouterr().out.strip() == "SERVING"


def _run(arguments: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["twinstage", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, arguments


def test_others_are_not(cluster: SecureCluster, certificates: Certificates, strangers: Certificates) -> None:
    for ca in (None, strangers.ca):
        with _client(cluster, ca, TOKEN) as client, pytest.raises(Unavailable):
            client.generate("Hello", SHORT)
    for token in ("", "another-token-0123456789"):
        with _client(cluster, certificates.ca, token) as client:
            for call in (client.models, client.workers, lambda: client.generate("Hello", SHORT)):
                with pytest.raises(Unauthenticated):
                    call()
            with pytest.raises(Unauthenticated), client.chat_stream("Hello", SHORT) as stream:
                next(stream)


def test_what_changes_something_for_others_needs_the_right(cluster: SecureCluster, certificates: Certificates) -> None:
    with _client(cluster, certificates.ca, TOKEN) as client:
        assert len(client.workers()) == 2
        with pytest.raises(PermissionDenied, match="'admin'"):
            client.reset_prefix_cache()
        with pytest.raises(PermissionDenied, match="'admin'"):
            client.drain_worker("decode-0")
    with _client(cluster, certificates.ca, ADMIN_TOKEN) as client:
        assert len(client.reset_prefix_cache()) == 2


def test_health_and_reflection_are_for_everybody(cluster: SecureCluster, certificates: Certificates) -> None:
    with grpc.secure_channel(cluster.address, tls_credentials(certificates.ca)) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = next(stub.ServerReflectionInfo(iter([question]), timeout=10))
        assert "twinstage.v1.GenerationService" in {service.name for service in answer.list_services_response.service}


def _worker_calls(channel: grpc.Channel) -> list[Callable[[], object]]:
    worker, prefill = worker_pb2_grpc.WorkerServiceStub(channel), worker_pb2_grpc.PrefillServiceStub(channel)
    decode = worker_pb2_grpc.DecodeServiceStub(channel)
    opening = worker_pb2.SessionRequest(open=worker_pb2.SessionOpen(session_id="mine"))
    return [
        lambda: worker.Describe(worker_pb2.DescribeRequest(), timeout=10),
        lambda: worker.ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(), timeout=10),
        lambda: worker.Drain(worker_pb2.DrainRequest(), timeout=10),
        lambda: next(prefill.Prefill(iter([worker_pb2.PrefillRequest()]), timeout=10)),
        lambda: next(decode.Session(iter([opening]), timeout=10)),
    ]


def test_workers_serve_only_those_with_certificate_and_secret(
    cluster: SecureCluster, certificates: Certificates, strangers: Certificates
) -> None:
    workers = [role.address for role in cluster.processes if role.ready_event == "worker ready"]
    assert len(workers) == 2
    own, foreign = (
        tls_credentials(certificates.ca, certificate=of.certificate("client"), key=of.key("client"))
        for of in (certificates, strangers)
    )
    cases = [
        (None, SECRET, {grpc.StatusCode.UNAVAILABLE}),
        (tls_credentials(certificates.ca), SECRET, {grpc.StatusCode.UNAVAILABLE}),
        (foreign, SECRET, {grpc.StatusCode.UNAVAILABLE}),
        (own, "", {grpc.StatusCode.UNAUTHENTICATED}),
        (own, TOKEN, {grpc.StatusCode.UNAUTHENTICATED}),
    ]
    for address in workers:
        for credentials, secret, codes in cases:
            name = "worker.internal" if credentials is not None else ""
            access = Access(credentials=credentials, token=secret, server_name=name)
            with access.open(address, ()) as channel:
                for call in _worker_calls(access.authorized(channel)):
                    with pytest.raises(grpc.RpcError) as caught:
                        call()
                    assert caught.value.code() in codes
        access = Access(credentials=own, token=SECRET, server_name="worker.internal")
        with access.open(address, ()) as channel:
            _worker_calls(access.authorized(channel))[0]()


def test_no_log_has_a_token(cluster: SecureCluster) -> None:
    for role in cluster.processes:
        log = role.log_path.read_text()
        assert role.ready_event in log
        for word in (TOKEN, ADMIN_TOKEN, SECRET):
            assert word not in log, role.name


async def test_replaced_certificates_count_for_who_connects_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloaded, "LOOK_INTERVAL_S", 0.0)
    for name in ("first", "second", "used"):
        (tmp_path / name).mkdir()
    first, second, used = (Certificates(tmp_path / name) for name in ("first", "second", "used"))
    files = TlsFiles(certificate=used.certificate("server"), key=used.key("server"), ca=used.ca, ca_flag="client-ca")

    def use(certificates: Certificates) -> None:
        for path in certificates.directory.iterdir():
            (used.directory / path.name).write_bytes(path.read_bytes())

    async def serves(certificates: Certificates) -> bool:
        shown = {"certificate": certificates.certificate("client"), "key": certificates.key("client")}
        credentials = tls_credentials(certificates.ca, **shown)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            try:
                await channel.unary_unary("/no/Method")(b"", timeout=5)
            except grpc.aio.AioRpcError as error:
                return bool(error.code() is grpc.StatusCode.UNIMPLEMENTED)
        return False

    use(first)
    server = create_server()
    port = bind(server, "127.0.0.1:0", server_credentials(files))
    await server.start()
    try:
        assert [await serves(first), await serves(second)] == [True, False]
        use(second)
        assert [await serves(first), await serves(second)] == [False, True]
        used.certificate("server").write_text("-----BEGIN CERTIFICATE-----")
        with capture_logs() as logs:
            assert await serves(second)
        assert "are no PEM certificate with its unencrypted key" in logs[0]["error"]
        use(first)
        assert [await serves(first), await serves(second)] == [True, False]
    finally:
        await server.stop(None)


def test_workers_are_called_with_what_the_files_say_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloaded, "LOOK_INTERVAL_S", 0.0)
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    flags = ["--workers", "127.0.0.1:1", "--worker-secret-file", str(secret)]
    access = read_settings(RouterSettings, flags).worker_access()
    assert access.current().token == SECRET
    secret.write_text(f"{TOKEN}\n{SECRET}")
    assert access.current().token == TOKEN


@pytest.mark.parametrize(
    ("certificate", "key", "ca", "expected"),
    [
        ("server.pem", None, None, "name both"),
        ("server.pem", "client.key", None, "no PEM certificate with its unencrypted key"),
        ("server.pem", "server.pem", None, "no PEM certificate with its unencrypted key"),
        ("missing.pem", "server.key", None, "No such file"),
        (None, None, "ca.pem", "needs --tls-certificate"),
        ("server.pem", "server.key", "server.key", "has no PEM certificate"),
    ],
)
def test_wrong_files_are_refused_at_the_start(
    certificates: Certificates, certificate: str | None, key: str | None, ca: str | None, expected: str
) -> None:
    paths = [None if name is None else certificates.directory / name for name in (certificate, key, ca)]
    files = TlsFiles(certificate=paths[0], key=paths[1], ca=paths[2], ca_flag="client-ca")
    with pytest.raises(ConfigError, match=expected):
        server_credentials(files)


def test_a_server_name_without_tls_is_refused() -> None:
    """Its owner wants to be sure of the server, and would send the secret in plain text to anybody."""
    named = ["--workers", "127.0.0.1:1", "--worker-tls-name", "worker.internal"]
    with pytest.raises(ConfigError, match="--worker-tls-name needs --worker-tls"):
        read_settings(RouterSettings, named).worker_access()
    with pytest.raises(ConfigError, match="--tls-name needs --tls"):
        AccessFlags(tls_name="router.internal").access()
    with pytest.raises(ConfigError, match="needs TLS credentials"):
        TwinstageClient("127.0.0.1:1", server_name="router.internal")
    with pytest.raises(ConfigError, match="line break"):
        TwinstageClient("127.0.0.1:1", token="secret\n")
    assert read_settings(RouterSettings, [*named, "--worker-tls"]).worker_access().current().credentials is not None
    assert AccessFlags(tls_name="router.internal", tls=True).access().credentials is not None
