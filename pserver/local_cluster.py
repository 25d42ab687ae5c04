"""A cluster of nodes on this machine, for tests, demos and benchmarks.

Each node is a process of its own, ``pserver serve``, on free loopback ports, with its settings
in a file and its output in a log. The first one or three of them keep the cluster's records (the
embedded store), unless the settings name an etcd. The lifeline of each (``backstay.lifeline``) says
when the node is ready, and stops the node when this process ends, killed or not. It imports no
gRPC and no native code.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from backstay import lifeline
from backstay.config import (
    ENDPOINT_VARIABLE,
    PADDLE_ENDPOINT_VARIABLE,
    ClientConfig,
    SecurityConfig,
    ServerConfig,
)
from backstay.consensus.records.plans import ResizePlan
from backstay.errors import ClosedError, ConfigError, ServerEndedError, ServerStartError
from backstay.exit_codes import ExitCode
from backstay.profiles import PROFILES, Profile
from backstay.pserver.free_ports import free_ports
from backstay.settings import find

if TYPE_CHECKING:
    from backstay.pserver.provisioning import PlanProvider

__all__ = ["LocalCluster", "LocalServer"]

SERVERS_MAX = 64
# A smaller group would stand still when one of two is lost; one alone is at least simple.
STORE_MEMBERS = 3
# Between the choice of a free port and its use another process may take it.
PORT_ATTEMPTS_MAX = 5
LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 16_384
KILL_WAIT_S = 5.0
READY_LINE_BYTES_MAX = 4096


class _PortTaken(ServerStartError):
    """It did not start because another process took its port first."""


@dataclass
class LocalServer:
    """One server of the cluster.

    Attributes:
        node_id: Its name.
        control_address: ``host:port`` of its gRPC services; the same after a restart.
        data_address: ``host:port`` of its data plane, empty while it does not run.
        metrics_address: ``host:port`` of its metrics, empty if it serves none or does not run.
        config_path: Its settings.
        log_path: What it wrote, over all restarts.
        process: The process, running or not.
    """

    node_id: str
    control_address: str
    config_path: Path
    log_path: Path
    process: subprocess.Popen[bytes]
    line: socket.socket
    data_address: str = ""
    metrics_address: str = ""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self.process.poll() is None

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])


class LocalCluster:
    """Servers on this machine, from ``with`` to its end.

    Example:
        >>> with LocalCluster(servers=3) as cluster:
        ...     client = Client(cluster.endpoints)
    """

    def __init__(
        self,
        servers: int = 1,
        *,
        directory: str | Path | None = None,
        settings: Mapping[str, object] | None = None,
        settings_of: Mapping[int, Mapping[str, object]] | None = None,
        startup_timeout_s: float = 60.0,
    ) -> None:
        """Prepare; nothing starts before ``start`` or ``with``.

        Args:
            servers: How many, 1 to 64.
            directory: Where settings and logs go; default: a temporary one, removed at the end.
            settings: Values for fields of ``ServerConfig``, the same for every server. What is
                not given here comes from the environment, as for any server; ``replicas`` is what
                ``profile`` says, else 2, or 1 with one server. A profile that writes checkpoints
                writes them to ``directory`` unless there is a ``checkpoint_url``.
            settings_of: By the number of a server, what differs there, such as its memory.
            startup_timeout_s: How long all of them together may take to be ready.

        Raises:
            ConfigError: ``servers`` is out of range, a setting is one that differs by server, or
                the profile needs more servers or a folder.
        """
        if not 1 <= servers <= SERVERS_MAX:
            raise ConfigError(f"servers: {servers} is out of range; allowed is 1 to {SERVERS_MAX}")
        self._settings: dict[str, object] = {"cluster": "local", **(settings or {})}
        profile = _profile_of(self._settings)
        if profile is None and servers > 1:
            self._settings.setdefault("replicas", 2)
        if profile is not None:
            self._settings |= _profile_settings(profile, self._settings, servers, directory)
        own = {"node_id", "listen_control", "listen_data", "advertise_host", "initial_nodes"}
        own |= {"metrics", "store_members", "store_data_dir"}
        self._settings_of = {index: dict(one) for index, one in (settings_of or {}).items()}
        given = self._settings.keys() | {name for one in self._settings_of.values() for name in one}
        if fixed := own & given:
            raise ConfigError(f"{min(fixed)}: each server of a local cluster gets its own")
        self._count = servers
        self._given_directory = directory
        self._startup_timeout_s = startup_timeout_s
        self._stack = ExitStack()
        self._directory = Path()
        self._keepers: list[str] = []
        self._numbers = servers
        self.servers: list[LocalServer] = []

    @property
    def endpoints(self) -> list[str]:
        """The control addresses, in the order of the servers."""
        return [server.control_address for server in self.servers]

    @property
    def pids(self) -> list[int]:
        """The process ids, in the order of the servers."""
        return [server.pid for server in self.servers]

    def environment(self) -> dict[str, str]:
        """Return the variables that tell a trainer, or a command, where the cluster is."""
        endpoints = ",".join(self.endpoints)
        return {PADDLE_ENDPOINT_VARIABLE: endpoints, ENDPOINT_VARIABLE: endpoints}

    def start(self) -> None:
        """Start all servers and wait until they serve.

        Raises:
            ServerStartError: One did not start in time; the message holds the end of its log.
        """
        if self.servers:
            raise ConfigError("this cluster has been started before; make another one")
        if self._given_directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="backstay-")
            directory = Path(self._stack.enter_context(temporary))
        else:
            directory = Path(self._given_directory)
            directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        for attempt in range(PORT_ATTEMPTS_MAX):
            try:
                self._start_all()
                return
            except _PortTaken:
                self._kill_all()
                if attempt == PORT_ATTEMPTS_MAX - 1:
                    self.stop()
                    raise
            except BaseException:
                self._kill_all()
                self.stop()
                raise

    def stop(self) -> list[int]:
        """Stop all servers gracefully and return their exit codes; harmless if repeated.

        One that takes longer than its own grace is killed.
        """
        for server in self.servers:
            server.process.terminate()
            # One that is paused cannot stop.
            server.process.send_signal(signal.SIGCONT)
        deadline_s = time.monotonic() + self._stop_limit_s
        codes = []
        for server in self.servers:
            try:
                server.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                server.process.kill()
            codes.append(server.process.wait())
            server.line.close()
        self._stack.close()
        return codes

    def check(self) -> None:
        """Make sure that all servers still run.

        Raises:
            ServerEndedError: One has ended; the message holds the end of its log.
        """
        for server in self.servers:
            if not server.is_running:
                raise ServerEndedError(
                    f"{server.node_id} at {server.control_address} has ended with exit code "
                    f"{server.process.returncode}; its log ends with:\n{server.log_tail()}"
                )

    def kill(self, index: int) -> None:
        """End one server at once, as a crash would."""
        server = self._server(index)
        server.process.kill()
        server.process.wait()
        server.line.close()
        server.data_address = server.metrics_address = ""

    def pause(self, index: int) -> None:
        """Let one server stand still, as a machine that hangs would."""
        self._server(index).process.send_signal(signal.SIGSTOP)

    def resume(self, index: int) -> None:
        """Let one server go on after ``pause``."""
        self._server(index).process.send_signal(signal.SIGCONT)

    def add_node(self) -> LocalServer:
        """Start one more server, wait until it serves, and return it.

        Raises:
            ServerStartError: It did not start in time.
        """
        return self.add_nodes(1)[0]

    def add_nodes(self, count: int) -> list[LocalServer]:
        """Start so many more servers at once, wait until they serve, and return them.

        Raises:
            ServerStartError: One did not start in time; none of them runs then.
        """
        self._server(0)
        if len(self.servers) + count > SERVERS_MAX:
            raise ConfigError(f"{len(self.servers)} + {count} servers; {SERVERS_MAX} at most")
        servers = [
            self._spawn_server(self._next_number(), address, {})
            for address in _free_addresses(count)
        ]
        try:
            self._wait_until_ready(servers)
        except BaseException:
            _kill(servers)
            raise
        self.servers += servers
        return servers

    def resize(
        self,
        servers: int,
        *,
        pause: bool = False,
        timeout_s: float | None = None,
        progress: Callable[[ResizePlan], None] | None = None,
    ) -> ResizePlan:
        """Have the rows on so many servers, while trainers go on; wait until they are.

        Missing servers are started; leaving servers end, and are no longer listed.

        Args:
            servers: How many.
            pause: Whether trainers are to wait while copies move.
            timeout_s: How long to wait at most; None: without end.
            progress: Called with the plan each time that it has changed.

        Raises:
            ResizeRefused: It cannot be done; the message says why.
            DeadlineExceeded: It is not done in time, and goes on.
            ServerStartError: One did not start in time.
        """
        # Here, so that a cluster that is only started needs no gRPC.
        from backstay.pserver.provisioning import provision
        from backstay.pserver.resizing import ClusterResizing

        self._server(0)
        provisioner = _LocalProvisioner(self)
        with ClusterResizing(",".join(self.endpoints), self.client_config()) as resizing:
            plan = resizing.resize(servers, pause=pause)
            provision(plan, provisioner)
            plan = resizing.wait(plan, timeout_s=timeout_s, progress=progress)
        provision(plan, provisioner)
        return plan

    def following_plans(self) -> PlanProvider:
        """Return what starts and cleans up servers, as plans of others ask, from ``with`` on."""
        from backstay.pserver.provisioning import PlanProvider

        return PlanProvider(lambda: self.endpoints, _LocalProvisioner(self), self.client_config())

    def reap(self, node_ids: Collection[str]) -> None:
        """Take servers off the list that were told to end; waits for their end.

        Raises:
            ServerEndedError: One did not end.
        """
        for server in [one for one in self.servers if one.node_id in node_ids]:
            try:
                server.process.wait(self._stop_limit_s)
            except subprocess.TimeoutExpired as error:
                raise ServerEndedError(
                    f"{server.node_id} does not end; its log ends with:\n{server.log_tail()}"
                ) from error
            server.line.close()
            self.servers.remove(server)

    def client_config(self) -> ClientConfig:
        """Return what a client of this cluster needs: the environment, and the token given here."""
        names = [item.name for item in fields(SecurityConfig)]
        given = {name: self._settings[name] for name in names if name in self._settings}
        return ClientConfig.load(explicit=given)

    def restart(self, *indexes: int) -> None:
        """Start servers again after ``kill``, empty, and wait until they serve.

        Args:
            indexes: Which ones. If most members of the embedded store are down, name them
                together: none of them can serve alone.

        Raises:
            ServerStartError: One did not start in time.
        """
        servers = [self._server(index) for index in indexes]
        for server in servers:
            if server.is_running:
                raise ConfigError(f"{server.node_id} is running; kill it first")
        for server in servers:
            server.process, server.line = _spawn(server.config_path, server.log_path)
        self._wait_until_ready(servers)

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _stop_limit_s(self) -> float:
        """How long a server may take to stop."""
        grace_ms = self._settings.get("stop_grace_ms", ServerConfig.stop_grace_ms)
        # Once for handing over, once for the requests under way.
        return 2 * float(str(grace_ms)) / 1000 + KILL_WAIT_S

    def _next_number(self) -> int:
        """Return a number that no server of this cluster has had."""
        self._numbers += 1
        return self._numbers - 1

    def _server(self, index: int) -> LocalServer:
        if not self.servers:
            raise ClosedError("the cluster was not started")
        return self.servers[index]

    def _start_all(self) -> None:
        addresses = _free_addresses(2 * self._count)
        control, raft = addresses[: self._count], addresses[self._count :]
        keepers = STORE_MEMBERS if self._count >= STORE_MEMBERS else 1
        members = [f"ps-{index}={raft[index]}" for index in range(keepers)]
        self._keepers = control[:keepers]
        for index, address in enumerate(control):
            store: dict[str, object] = {}
            if index < keepers and self._keeps_store:
                data_dir = str(self._directory / f"ps-{index}.store")
                store = {"store_members": members, "store_data_dir": data_dir}
            self.servers.append(self._spawn_server(index, address, store))
        self._numbers = self._count
        self._wait_until_ready(self.servers)

    @property
    def _keeps_store(self) -> bool:
        return self._settings.get("store", "embedded") == "embedded"

    def _spawn_server(self, index: int, address: str, store: dict[str, object]) -> LocalServer:
        """Write a server's settings and start it."""
        node_id = f"ps-{index}"
        config_path = self._directory / f"{node_id}.toml"
        log_path = self._directory / f"{node_id}.log"
        if self._keeps_store and not store:
            store = {"store_endpoints": self._keepers}
        settings: dict[str, object] = {
            **self._settings,
            **self._settings_of.get(index, {}),
            **store,
            "node_id": node_id,
            "listen_control": address,
            "listen_data": "127.0.0.1:0",
            # The environment may say how a real server of this machine is reached.
            "advertise_host": "127.0.0.1",
            "initial_nodes": self._count,
            "metrics": "127.0.0.1:0",
        }
        _write_settings(config_path, settings)
        process, line = _spawn(config_path, log_path)
        return LocalServer(node_id, address, config_path, log_path, process, line)

    def _wait_until_ready(self, servers: list[LocalServer]) -> None:
        """Wait for the line that each server writes, or for its end."""
        deadline_s = time.monotonic() + self._startup_timeout_s
        with selectors.DefaultSelector() as selector:
            for server in servers:
                selector.register(server.line, selectors.EVENT_READ, server)
            while selector.get_map():
                events = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not events:
                    late = next(iter(selector.get_map().values())).data
                    raise ServerStartError(
                        f"{late.node_id} at {late.control_address} was not ready within "
                        f"{self._startup_timeout_s:g} s; its log ends with:\n{late.log_tail()}"
                    )
                for key, _ in events:
                    _take_ready_line(key.data)
                    selector.unregister(key.fileobj)

    def _kill_all(self) -> None:
        _kill(self.servers)
        self.servers.clear()


class _LocalProvisioner:
    """Starts processes on this machine; a :class:`~backstay.pserver.provisioning.Provisioner`."""

    def __init__(self, cluster: LocalCluster) -> None:
        """Look after the servers of a cluster."""
        self._cluster = cluster

    def running(self) -> int:
        """Return how many run."""
        return sum(server.is_running for server in self._cluster.servers)

    def start(self, count: int) -> None:
        """Start them and wait until they serve.

        Raises:
            ServerStartError: One did not start.
        """
        self._cluster.add_nodes(count)

    def ended(self, node_ids: Collection[str]) -> None:
        """Forget the servers that have ended."""
        self._cluster.reap(node_ids)


def _profile_of(settings: Mapping[str, object]) -> Profile | None:
    """Return the profile that the servers will have; a wrong name is for them to refuse."""
    return PROFILES.get(str(_chosen("profile", settings)))


def _chosen(name: str, settings: Mapping[str, object]) -> object:
    """Return the value that a setting will have in the servers; None: its default."""
    found = find(name, settings, {}, os.environ)
    return None if found is None else found.value


def _profile_settings(
    profile: Profile,
    settings: Mapping[str, object],
    servers: int,
    directory: str | Path | None,
) -> dict[str, object]:
    """Return the settings that a profile needs here and that are not set: a checkpoint folder.

    Raises:
        ConfigError: There is none, or there are too few servers for its copies.
    """
    if not _chosen("replicas", settings) and profile.replicas > servers:
        raise ConfigError(
            f"profile: {profile.name!r} keeps {profile.replicas} copies of each slot, each on a "
            f"server of its own; start at least {profile.replicas} servers"
        )
    if not profile.has_checkpoints or _chosen("checkpoint_url", settings):
        return {}
    if directory is None:
        raise ConfigError(
            f"profile: {profile.name!r} writes checkpoints, and there is no place for them: name a "
            "folder that stays (--log-dir) or set checkpoint_url (BACKSTAY_CHECKPOINT_URL)"
        )
    return {"checkpoint_url": str(Path(directory).absolute() / "checkpoints")}


def _kill(servers: Iterable[LocalServer]) -> None:
    for server in servers:
        server.process.kill()
        server.process.wait()
        server.line.close()


def _take_ready_line(server: LocalServer) -> None:
    line = server.line.recv(READY_LINE_BYTES_MAX)
    if line:
        ready = lifeline.Ready.from_line(line)
        server.data_address, server.metrics_address = ready.data_address, ready.metrics_address
        return
    # The line is closed: the process has ended or is about to.
    exit_code = server.process.wait()
    kind = _PortTaken if exit_code == ExitCode.CANNOT_LISTEN else ServerStartError
    raise kind(
        f"{server.node_id} at {server.control_address} did not start (exit code {exit_code}); "
        f"its log ends with:\n{server.log_tail()}"
    )


def _free_addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def _spawn(config_path: Path, log_path: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a server; return the process and our end of its lifeline."""
    command = [sys.executable, "-m", "backstay.pserver.serve_cli", "serve"]
    with log_path.open("ab") as log:
        return lifeline.start([*command, "--config", str(config_path)], env=os.environ, log=log)


def _write_settings(path: Path, settings: Mapping[str, object]) -> None:
    """Write a configuration file that only this user can read: it may hold the token."""
    # A JSON string, number, boolean or list of strings is the same in TOML.
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write("[server]\n" + "\n".join(lines) + "\n")
