"""`twinstage serve`: a local cluster in the foreground."""

from __future__ import annotations

import sys
import time

from twinstage.cli.cluster import DRAIN_S, Cluster
from twinstage.cli.cluster_config import ClusterConfig
from twinstage.cli.output import LogPrinter, console_for_errors
from twinstage.cli.signals import stopped_by_signals
from twinstage.errors import Cancelled
from twinstage.types import Task


def serve(config: ClusterConfig, *, start_timeout_s: float) -> None:
    """Run a cluster until a signal. Raises TwinstageError when it cannot start or breaks down."""
    console = console_for_errors()
    cluster = Cluster(config, on_line=LogPrinter(console, level=config.log_level))
    started_s = time.monotonic()
    with stopped_by_signals(cluster), cluster:
        console.print(f"starting {', '.join(cluster.processes)}; Ctrl-C stops everything", style="bold", soft_wrap=True)
        try:
            cluster.wait_ready(start_timeout_s)
            console.print(f"ready after {time.monotonic() - started_s:.1f} s", style="bold")
            _announce(cluster)
            cluster.wait()
        except Cancelled:
            pass  # stopped while starting
        console.print(f"stopping; requests in progress get {DRAIN_S:g} s", style="bold")
        cluster.stop(on_ended=lambda name: console.print(f"stopped {name}"))


def _announce(cluster: Cluster) -> None:
    """The address and a command to try, on standard output."""
    print(f"serving on {cluster.address}")
    security = cluster.config.security
    how = " --tls-ca CA_FILE" if security.tls_certificate is not None else ""
    how += " --tls-certificate FILE --tls-key FILE" if security.tls_client_ca is not None else ""
    how += " --token-file FILE" if security.tokens_file is not None else ""
    if any(model.task is Task.GENERATE for model in cluster.models):
        print(f'try: twinstage chat "What is the capital of France?" --address {cluster.address}{how}')
    else:
        print(f'try: twinstage embed "Hello" --address {cluster.address}{how}')
    sys.stdout.flush()
