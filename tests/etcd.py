"""A real etcd for tests: one or three members on free loopback ports, to be killed and paused.

``EtcdCluster`` starts them below a folder of its own; every start of a member reuses its ports
and its data. ``require_etcd`` skips the test where there is no etcd.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path
from types import TracebackType

import pytest

from backstay.pserver.free_ports import free_ports
from tests.processes import takes_connections
from tests.waiting import wait_until

START_LIMIT_S = 120.0


def require_etcd() -> str:
    """Return the path of etcd, or skip."""
    path = shutil.which("etcd")
    if path is None:
        pytest.skip("etcd is not installed (Debian: apt-get install etcd-server)")
    return path


class EtcdCluster:
    """One or three members of etcd, as processes of this test."""

    def __init__(
        self,
        folder: Path,
        members: int = 1,
        *,
        tls: tuple[Path, Path] | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        """Prepare; ``start`` starts them.

        Args:
            folder: For data and logs.
            members: 1 or 3.
            tls: Certificate and key files for the client URLs.
            arguments: Further ones of etcd's.
        """
        self._program = require_etcd()
        self._folder = folder
        self._arguments = arguments
        self._tls = tls
        ports = free_ports(2 * members)
        self._client_ports, self._peer_ports = ports[:members], ports[members:]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members

    @property
    def endpoints(self) -> tuple[str, ...]:
        """``host:port`` of each member, for clients."""
        return tuple(f"127.0.0.1:{port}" for port in self._client_ports)

    def start(self, *, wait: bool = True) -> None:
        """Start all members that do not run."""
        for index in range(len(self._processes)):
            self.start_member(index)
        if wait:
            self.wait_healthy()

    def start_member(self, index: int) -> None:
        """Start one member with the data that it has."""
        if self._processes[index] is not None:
            return
        scheme = "http" if self._tls is None else "https"
        client = f"{scheme}://{self.endpoints[index]}"
        peer = f"http://127.0.0.1:{self._peer_ports[index]}"
        cluster = ",".join(
            f"m{other}=http://127.0.0.1:{port}" for other, port in enumerate(self._peer_ports)
        )
        certificates = (
            [f"--cert-file={self._tls[0]}", f"--key-file={self._tls[1]}"] if self._tls else []
        )
        with (self._folder / f"etcd-{index}.log").open("ab") as log:
            self._processes[index] = subprocess.Popen(
                [
                    self._program,
                    f"--name=m{index}",
                    f"--data-dir={self._folder / f'etcd-{index}'}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster={cluster}",
                    "--heartbeat-interval=50",
                    "--election-timeout=500",
                    # A test's machine is slow to sync, and its data need not survive a power cut.
                    "--unsafe-no-fsync",
                    "--logger=zap",
                    "--log-level=warn",
                    *certificates,
                    *self._arguments,
                ],
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if "ETCD" not in name},
            )

    def kill(self, index: int = 0) -> None:
        """End one member with SIGKILL."""
        process = self._processes[index]
        if process is not None:
            process.kill()
            process.wait()
            self._processes[index] = None

    def pause(self, index: int = 0) -> None:
        """Stop one member's clock (SIGSTOP)."""
        process = self._signal(index, signal.SIGSTOP)
        # Until then it may still answer.
        os.waitpid(process.pid, os.WUNTRACED)

    def resume(self, index: int = 0) -> None:
        """Let it go on (SIGCONT)."""
        self._signal(index, signal.SIGCONT)

    def wipe(self, index: int = 0) -> None:
        """Delete the data of a member that does not run."""
        assert self._processes[index] is None
        shutil.rmtree(self._folder / f"etcd-{index}")

    def leader(self) -> int:
        """Return the index of the member that leads now."""

        def leads(index: int) -> bool:
            fields = self.etcdctl("endpoint", "status", index=index).split(", ")
            return len(fields) > 4 and fields[4] == "true"

        def first_leader() -> list[int]:
            running = [index for index, one in enumerate(self._processes) if one is not None]
            return next(([index] for index in running if leads(index)), [])

        found = wait_until(
            first_leader, "a member of etcd leads", limit_s=START_LIMIT_S, pause_s=0.05
        )
        return found[0]

    def etcdctl(self, *arguments: str, index: int = 0) -> str:
        """Run etcdctl against one member and return what it prints."""
        done = subprocess.run(
            ["etcdctl", f"--endpoints={self.endpoints[index]}", *arguments],
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
            check=False,
            env=os.environ | {"ETCDCTL_API": "3"},
        )
        return done.stdout.strip()

    def wait_healthy(self) -> None:
        """Wait until every member that runs takes connections and there is a leader."""
        for index, port in enumerate(self._client_ports):
            if self._processes[index] is not None:
                log = self._folder / f"etcd-{index}.log"
                wait_until(
                    partial(takes_connections, port),
                    partial(log.read_text, errors="replace"),
                    limit_s=START_LIMIT_S,
                )
        if self._tls is None:
            self.leader()

    def stop(self) -> None:
        """End all members."""
        for index in range(len(self._processes)):
            self.kill(index)

    def __enter__(self) -> EtcdCluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _signal(self, index: int, number: int) -> subprocess.Popen[bytes]:
        process = self._processes[index]
        assert process is not None
        process.send_signal(number)
        return process
