"""TLS on the KV channel: who has no certificate of the right CA stays out, and nothing can be read on the way."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from transfer_ends import (
    FAST,
    SECRET,
    WAIT_S,
    Delegate,
    Results,
    commit_of,
    errors_of,
    eventually,
    fill_randomly,
    identity,
    make_tls,
    short_directory,
)
from twinstage.errors import ConfigError, HandshakeRefused, TransferError
from twinstage.hosting.settings import WorkerSettings
from twinstage.kv.memory import BlockMemory
from twinstage.rpc.worker_process import kv_tls
from twinstage.transfer.receiver import ChannelTimeouts, KvReceiver
from twinstage.transfer.sender import HandoverDone, KvSender, TransferOutcome
from twinstage.transfer.tls import KvTls
from twinstage.types import KvEndpoint, KvGrant, WorkerId


class Pair:
    """A receiver and a sender, each with the TLS that it is given; None has none."""

    def __init__(self, receivers: KvTls | None, senders: KvTls | None, timeouts: ChannelTimeouts) -> None:
        self.source = BlockMemory.create(num_blocks=8, block_bytes=4096)
        self.target = BlockMemory.create(num_blocks=8, block_bytes=4096)
        fill_randomly(self.source, seed=3)
        self.receiver = KvReceiver(
            self.target,
            identity(),
            secret=SECRET,
            delegate=Delegate(),
            shm_directory=None,
            tcp_listen=("127.0.0.1", 0),
            timeouts=timeouts,
            tls=None if receivers is None else lambda: receivers,
        )
        self.receiver.start()
        self.sender = KvSender(
            self.source,
            identity("prefill-1", 8),
            secret=SECRET,
            timeouts=timeouts,
            tls=None if senders is None else lambda: senders,
        )
        self._next_id = 1

    def hand_over(self, endpoints: tuple[KvEndpoint, ...] | None = None) -> TransferOutcome:
        """One block, block 3 to block 5."""
        grant = KvGrant(
            worker_id=WorkerId("decode-1"),
            epoch=41,
            transfer_id=self._next_id,
            generation=1,
            token=b"token" * 8,
            block_ids=(5,),
            layout_fingerprint="layout-1",
            endpoints=endpoints or self.receiver.endpoints,
            lease_s=30.0,
        )
        self._next_id += 1
        self.receiver.expect(grant)
        results = Results()
        transfer = self.sender.open(grant, results.callback(grant.transfer_id))
        transfer.write((3,), 0)
        transfer.commit(commit_of(grant.transfer_id))
        outcome = results.wait(grant.transfer_id)
        self.receiver.revoke(grant.transfer_id, lambda: None)
        return outcome

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.source.close()
        self.target.close()


@contextmanager
def pair(receivers: KvTls | None, senders: KvTls | None, timeouts: ChannelTimeouts | None = None) -> Iterator[Pair]:
    made = Pair(receivers, senders, timeouts or ChannelTimeouts())
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def test_workers_of_one_authority_hand_over_and_say_so(authority: trustme.CA) -> None:
    with pair(make_tls(authority), make_tls(authority)) as ends:
        assert [endpoint.transport for endpoint in ends.receiver.endpoints] == ["tls"]
        outcome = ends.hand_over()
        assert isinstance(outcome, HandoverDone), outcome
        assert ends.target.block(5) == ends.source.block(3)


def test_who_has_another_authority_stays_out_on_either_side(authority: trustme.CA) -> None:
    other = trustme.CA()
    ours, strangers = make_tls(authority), make_tls(other)
    credulous = make_tls(other, trusted=authority)  # takes the receiver's certificate, and has one of its own
    for receiver, sender in ((ours, strangers), (ours, credulous), (make_tls(authority, trusted=other), ours)):
        with pair(receiver, sender) as ends:
            error = errors_of(ends.hand_over())
            assert isinstance(error, HandshakeRefused), error
            assert "--kv-tls-ca" in str(error)
            assert bytes(ends.target.block(5)) == bytes(4096)


def test_a_sender_without_a_certificate_stays_out(authority: trustme.CA) -> None:
    ours = make_tls(authority)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    authority.configure_trust(bare)
    with pair(ours, replace(ours, sender=bare)) as ends:
        error = errors_of(ends.hand_over())
        assert isinstance(error, HandshakeRefused), error
        assert "certificate required" in str(error)
        assert bytes(ends.target.block(5)) == bytes(4096)


def test_tls_and_none_refuse_each_other_by_name(authority: trustme.CA) -> None:
    ours = make_tls(authority)
    with pair(ours, None) as ends:
        assert "offers tls at" in str(errors_of(ends.hand_over()))
        # Also when it is led astray: what it says is no handshake of TLS.
        misled = tuple(replace(endpoint, transport="tcp") for endpoint in ends.receiver.endpoints)
        assert isinstance(errors_of(ends.hand_over(misled)), TransferError)
    with pair(None, ours) as ends:
        assert "offers tcp at" in str(errors_of(ends.hand_over()))
        misled = tuple(replace(endpoint, transport="tls") for endpoint in ends.receiver.endpoints)
        assert isinstance(errors_of(ends.hand_over(misled)), TransferError)
        assert bytes(ends.target.block(5)) == bytes(4096)


def test_an_older_version_of_tls_is_refused(authority: trustme.CA) -> None:
    ours = make_tls(authority)
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname = False
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    authority.configure_trust(older)
    authority.issue_cert("any.worker").configure_cert(older)
    with pair(ours, replace(ours, sender=older)) as ends:
        assert "version" in str(errors_of(ends.hand_over()))


@contextmanager
def _tapped(address: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Another address of the same receiver, and all that went by there."""
    host, _, port = address.rpartition(":")
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):  # either end may leave first
                while data := source.recv(65536):
                    seen.append(data)
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            with listener.accept()[0] as near, socket.create_connection((host, int(port))) as far:
                back = threading.Thread(target=pass_on, args=(far, near))
                back.start()
                pass_on(near, far)
                back.join()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", lambda: b"".join(seen)
        thread.join(WAIT_S)


@pytest.mark.parametrize("is_encrypted", [True, False], ids=["tls", "tcp"])
def test_blocks_cannot_be_read_on_the_way(authority: trustme.CA, is_encrypted: bool) -> None:
    """Without TLS they can, or the tap would prove nothing."""
    ours = make_tls(authority) if is_encrypted else None
    with pair(ours, ours) as ends:
        (endpoint,) = ends.receiver.endpoints
        with _tapped(endpoint.address) as (address, seen):
            outcome = ends.hand_over((replace(endpoint, address=address),))
            assert isinstance(outcome, HandoverDone), outcome
            ends.sender.close()
        assert (bytes(ends.source.block(3))[:64] in seen()) != is_encrypted
        assert (b"prefill-1" in seen()) != is_encrypted


def test_a_certificate_that_is_over_is_named_as_such(authority: trustme.CA) -> None:
    ours = make_tls(authority)
    over = make_tls(authority, not_after=datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1))
    for receiver, sender in ((ours, over), (over, ours)):
        with pair(receiver, sender) as ends:
            error = errors_of(ends.hand_over())
            assert isinstance(error, HandshakeRefused), error
            assert "certificate" in str(error)
            assert "expired" in str(error)


@contextmanager
def _relayed(address: str, tls: KvTls) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """As `_tapped`, by one who has a certificate and speaks TLS with either side."""
    host, _, port = address.rpartition(":")
    seen: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as accepted:
            near = tls.receiver.wrap_socket(accepted, server_side=True)
            far = tls.sender.wrap_socket(socket.create_connection((host, int(port))))
            with near, far:
                sides = {near: far, far: near}
                while readable := select.select(sides, [], [], WAIT_S)[0]:
                    for side in readable:
                        data = side.recv(65536)
                        if not data:
                            return
                        seen.append(data)
                        sides[side].sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", lambda: b"".join(seen)
        thread.join(WAIT_S)


@pytest.mark.parametrize("is_worker", [False, True], ids=["another certificate", "the receiver's own"])
def test_who_has_another_certificate_of_the_ca_cannot_sit_between(authority: trustme.CA, is_worker: bool) -> None:
    """The proof of the secret holds for the receiver's certificate; without that the relay would work, as it does here
    with the receiver's own key.
    """
    ours = make_tls(authority)
    with pair(ours, ours) as ends:
        (endpoint,) = ends.receiver.endpoints
        with _relayed(endpoint.address, ours if is_worker else make_tls(authority)) as (address, seen):
            outcome = ends.hand_over((replace(endpoint, address=address),))
            ends.sender.close()
        assert isinstance(outcome, HandoverDone) == is_worker
        assert (bytes(ends.source.block(3))[:64] in seen()) == is_worker
        if not is_worker:
            assert "secret" in str(errors_of(outcome))


def test_a_connection_is_replaced_before_its_keys_are_worn(
    authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinstage.transfer.tls.MAX_BYTES_PER_CONNECTION", 10_000)
    ours = make_tls(authority)
    with pair(ours, ours) as ends:
        peers = []
        for _ in range(6):  # of 4 KiB each
            assert isinstance(ends.hand_over(), HandoverDone)
            peers.append(ends.sender._peers[-1])
        used = list(dict.fromkeys(peers))
        assert 2 <= len(used) <= 3
        for peer in used[:-1]:
            peer._writer.join(WAIT_S)
            assert not peer.is_alive


def test_a_connection_that_is_reset_at_once_leaves_no_descriptor(authority: trustme.CA) -> None:
    ours = make_tls(authority)
    with pair(ours, ours) as ends:
        host, _, port = ends.receiver.endpoints[0].address.rpartition(":")
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            with socket.create_connection((host, int(port))) as rude:
                rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert isinstance(ends.hand_over(), HandoverDone)


def test_a_stranger_who_begins_no_handshake_is_hung_up_on(authority: trustme.CA) -> None:
    ours = make_tls(authority)
    with pair(ours, ours, FAST) as ends:
        host, _, port = ends.receiver.endpoints[0].address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as silent:
            assert silent.recv(1) == b""  # after FAST's two seconds


def test_certificates_can_be_replaced_while_workers_run(authority: trustme.CA, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinstage.rpc.reloaded.LOOK_INTERVAL_S", 0.0)
    with short_directory() as directory:
        settings = _settings(directory)
        _write(directory, authority)
        source = kv_tls(settings)
        assert source is not None
        first = source()
        assert source() is first
        _write(directory, trustme.CA())
        assert source() is not first
        (directory / "key").write_text("no key")
        kept = source()
        with pair(kept, kept) as ends:
            assert isinstance(ends.hand_over(), HandoverDone)


def test_files_that_cannot_be_used_are_named() -> None:
    with short_directory() as directory:
        _write(directory, trustme.CA())
        settings = _settings(directory)
        assert settings.announced_transports == ("shm", "tls")
        with pytest.raises(ConfigError, match="name all three"):
            kv_tls(settings.model_copy(update={"kv_tls_ca": None}))
        plain = (directory / "certificate").read_text()
        for written in (
            plain.replace("CERTIFICATE", "TRUSTED CERTIFICATE"),
            plain.replace("CERTIFICATE", "X509 CERTIFICATE"),
        ):
            (directory / "certificate").write_text(written + plain)  # OpenSSL would show the first
            with pytest.raises(ConfigError, match="--kv-tls-certificate"):
                kv_tls(settings)
        (directory / "certificate").write_text("of some kind\n" + plain)
        assert kv_tls(settings) is not None
        (directory / "ca").write_text("no certificate")
        with pytest.raises(ConfigError, match="--kv-tls-ca"):
            kv_tls(settings)
        (directory / "key").unlink()
        with pytest.raises(ConfigError, match="--kv-tls-key"):
            kv_tls(settings)
    assert kv_tls(WorkerSettings()) is None
    assert WorkerSettings().announced_transports == ("shm", "tcp")


def _settings(directory: Path) -> WorkerSettings:
    return WorkerSettings(
        kv_tls_certificate=directory / "certificate", kv_tls_key=directory / "key", kv_tls_ca=directory / "ca"
    )


def _write(directory: Path, authority: trustme.CA) -> None:
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    certificate = authority.issue_cert("any.worker", not_after=until)
    certificate.cert_chain_pems[0].write_to_path(directory / "certificate")
    certificate.private_key_pem.write_to_path(directory / "key")
    authority.cert_pem.write_to_path(directory / "ca")
