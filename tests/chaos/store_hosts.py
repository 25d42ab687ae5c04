"""The coordination store of a run when it is etcd: one or three members, each on its own host."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

from backstay.pserver.free_ports import free_ports
from tests.chaos.network import Host, Network
from tests.chaos.processes import END_LIMIT_S, Process, environment

__all__ = ["EtcdHosts"]

START_LIMIT_S = 30.0
POLL_PAUSE_S = 0.05


class EtcdHosts:
    """Members of etcd, to be killed, paused and cut off."""

    def __init__(self, network: Network, folder: Path, members: int) -> None:
        """Make the hosts; ``start`` starts the members."""
        if shutil.which("etcd") is None:
            raise RuntimeError("etcd is not installed (Debian: apt-get install etcd-server)")
        self.hosts: list[Host] = [network.add_host(f"etcd-{n}") for n in range(members)]
        ports = [2379] * members, [2380] * members
        if not network.has_faults:
            free = free_ports(2 * members)
            ports = free[:members], free[members:]
        self.endpoints = [
            f"{host.address}:{port}" for host, port in zip(self.hosts, ports[0], strict=True)
        ]
        peers = [
            f"http://{host.address}:{port}" for host, port in zip(self.hosts, ports[1], strict=True)
        ]
        cluster = ",".join(f"m{n}={peer}" for n, peer in enumerate(peers))
        self.members = [
            Process(
                host,
                [
                    *("setpriv", "--pdeathsig", "KILL", "etcd", f"--name=m{n}"),
                    f"--data-dir={folder / f'etcd-{n}'}",
                    f"--listen-client-urls=http://{self.endpoints[n]}",
                    f"--advertise-client-urls=http://{self.endpoints[n]}",
                    f"--listen-peer-urls={peers[n]}",
                    f"--initial-advertise-peer-urls={peers[n]}",
                    f"--initial-cluster={cluster}",
                    "--heartbeat-interval=100",
                    "--election-timeout=1000",
                    # A power cut is not among the faults, and the disk is shared.
                    *("--unsafe-no-fsync", "--logger=zap", "--log-level=warn"),
                ],
                folder / f"etcd-{n}.log",
            )
            for n, host in enumerate(self.hosts)
        ]

    def start(self) -> None:
        """Start all members and wait until one leads."""
        for member in self.members:
            member.start()
        self.leader()

    def leader(self) -> int:
        """Return the index of the member that leads now."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s:
            for index, member in enumerate(self.members):
                if member.is_running and not member.paused and self._leads(index):
                    return index
            time.sleep(POLL_PAUSE_S)
        raise RuntimeError(f"no member of etcd leads: {self.members[0].log_tail()}")

    def stop(self) -> None:
        """End all members."""
        for member in self.members:
            if member.is_running:
                member.kill()

    def _leads(self, index: int) -> bool:
        command = ["etcdctl", f"--endpoints={self.endpoints[index]}", "--command-timeout=1s"]
        done = subprocess.run(
            [*command, "endpoint", "status", "--write-out=json"],
            capture_output=True,
            text=True,
            timeout=END_LIMIT_S,
            check=False,
            env=environment() | {"ETCDCTL_API": "3"},
        )
        if done.returncode != 0 or not done.stdout.strip():
            return False
        status = json.loads(done.stdout)[0]["Status"]
        return bool(status["header"]["member_id"] == status.get("leader"))
