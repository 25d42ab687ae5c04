"""Keeps a client's routing up to date, and says aloud what its calls wait for.

Two threads: one reads the stream of routing tables from any node and goes to the next when it
breaks; one hears from the native client that servers do not answer, and then asks other nodes,
because the one that is watched may be the one that hangs. Imports the directory, the records and
the errors. Never moves rows, never holds its :class:`~backstay.trainer.Client`.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

import numpy as np

from backstay._native import DataClient
from backstay.backoff import Backoff
from backstay.cluster.directory import ClusterInfo, Directory, RoutingStream
from backstay.config import ClientConfig
from backstay.errors import BackstayError, ClosedError

__all__ = ["ClusterWatch", "ProgressHook", "made_data_plane", "set_routing"]

_LOG = logging.getLogger(__name__)

# How long one node is asked when a server does not answer, before the next node.
_LOOK_DEADLINE_MS = 1000
# Between two looks at the cluster that found nothing new.
_RETRY = Backoff(first_s=0.05, longest_s=1.0)
_JOIN_S = 2.0
# How the native client is told that a slot has no master.
_NO_MASTER = 2**32 - 1

ProgressHook = Callable[[str], None]


def set_routing(native: DataClient, info: ClusterInfo) -> bool:
    """Hand a routing table to the native client; False if it is not newer than the known one."""
    routing = info.routing
    masters = np.where(routing.master_of_slot < 0, _NO_MASTER, routing.master_of_slot)
    return native.set_routing(
        routing.version,
        [(node.node_id, node.data_address, node.instance) for node in routing.nodes],
        np.ascontiguousarray(masters, dtype=np.uint32),
        generation=routing.generation,
        loss=info.loss,
    )


def made_data_plane(config: ClientConfig, info: ClusterInfo) -> DataClient:
    """Return a native client of that cluster, going by the routing in ``info``.

    Raises:
        ConfigError: A TLS file cannot be read or is damaged.
    """
    pems = config.read_pems()
    native = DataClient(
        cluster_id=info.cluster_id,
        client_name=f"{socket.gethostname()}:{os.getpid()}",
        # 64 random bits name this client's stream of pushes.
        stream_job=secrets.randbits(64),
        token=config.token,
        tls_ca_pem=pems.ca,
        tls_cert_pem=pems.cert,
        tls_key_pem=pems.key,
        connect_timeout_ms=config.connect_timeout_ms,
        stall_timeout_ms=config.stall_timeout_ms,
        max_frame_bytes=config.max_frame_bytes,
        part_bytes=config.part_bytes,
        max_pushes_in_flight=config.max_pushes_in_flight,
    )
    set_routing(native, info)
    return native


class ClusterWatch:
    """The threads of one client, from :meth:`start` to :meth:`close`.

    The threads hold this object and not the client: a thread that held its client would keep
    it for ever.
    """

    def __init__(
        self,
        native: DataClient,
        directory: Directory,
        info: ClusterInfo,
        progress: ProgressHook | None = None,
    ) -> None:
        self._native = native
        self._directory = directory
        self._info = info
        self._progress = progress
        self._lock = threading.Lock()
        self._closing = threading.Event()
        # None while no stream is open. The endpoint stays: the next stream is opened at the next
        # node.
        self._stream: RoutingStream | None = None
        self._stream_endpoint = ""
        # Set while calls may begin.
        self._running = threading.Event()
        self._paused = ""
        self._running.set()
        self._strangers: set[str] = set()
        self._looks = _RETRY.begin()
        # Daemons: a program that forgets to close its client must still end.
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in (
                (self._follow, "backstay-watch"),
                (self._listen, "backstay-events"),
            )
        ]

    @property
    def info(self) -> ClusterInfo:
        """The newest nodes and routing."""
        with self._lock:
            return self._info

    def start(self) -> None:
        """Begin to watch."""
        self._pause(self.info.paused)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End both threads; a second call does nothing."""
        self._closing.set()
        # A caller that waits is told that the client is closed.
        self._running.set()
        self._native.unwatch()
        self._cancel_stream()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=_JOIN_S)

    def apply(self, info: ClusterInfo) -> bool:
        """Go by this routing if it is of the same cluster and newer; return whether it is."""
        with self._lock:
            if info.cluster_uid != self._info.cluster_uid:
                self._refuse(info)
                return False
            if not set_routing(self._native, info):
                return False
            known, self._info = self._info, info
        self._directory.learn(info)
        if info.routing.generation > known.routing.generation:
            _LOG.error(
                "the cluster lost rows with all their copies (generation %d): "
                "what this client trained on is gone%s",
                info.routing.generation,
                f": {info.loss}" if info.loss else "",
            )
        _LOG.debug("routing %d", info.routing.version)
        return True

    def wait_until_running(self) -> None:
        """Return at once, or when the cluster wants nothing to wait any more.

        Raises:
            ClosedError: The client was closed meanwhile.
        """
        if self._running.is_set():
            return
        self._running.wait()
        if self._closing.is_set():
            raise ClosedError("the client was closed while the cluster was paused")

    def _pause(self, why: str) -> None:
        """Let calls wait before they begin, or go on if there is no reason."""
        before, self._paused = self._paused, why
        if why == before:
            return
        if why:
            self._running.clear()
        else:
            self._running.set()
        self._say(f"waiting: {why}" if why else "going on: the cluster is not paused any more")

    def _say(self, text: str) -> None:
        _LOG.info("%s", text)
        self._tell_hook(text)

    def _tell_hook(self, text: str) -> None:
        if self._progress is not None:
            try:
                self._progress(text)
            except Exception:  # noqa: BLE001
                # The hook is the user's; what it raises must not end the watch.
                _LOG.exception("the progress hook raised")

    def _refuse(self, info: ClusterInfo) -> None:
        """Say, once, that some server belongs to another cluster of the same name."""
        if info.cluster_uid not in self._strangers:
            self._strangers.add(info.cluster_uid)
            _LOG.error(
                "a server among %s belongs to another cluster named %r: its coordination store was "
                "emptied or replaced; this client stays with the cluster that it began with",
                ", ".join(node.control_address for node in info.nodes),
                info.cluster_id,
            )

    # -- the stream -----------------------------------------------------------------------

    def _follow(self) -> None:
        """Read the stream at one node after the other, until the client is closed."""
        failures = 0
        while not self._closing.is_set():
            endpoints = self._directory.endpoints()
            endpoint = self._next_after(self._stream_endpoint, endpoints)
            opened_s = time.monotonic()
            version = self._native.routing_version
            try:
                self._read_stream(endpoint)
            except BackstayError as error:
                _LOG.debug("the stream from %s ended: %s", endpoint, error)
            lasted = time.monotonic() - opened_s > _RETRY.longest_s
            if lasted or self._native.routing_version > version:
                # It worked before it broke, so the next node is asked at once.
                failures = 0
            failures += 1
            if failures >= len(endpoints):
                # No server tells how the cluster does. A pause must not outlive it: calls go on to
                # their own deadline.
                self._pause("")
                # Every node was tried in turn: not in a busy loop.
                self._closing.wait(_RETRY.pause_s(failures // len(endpoints)))

    def _read_stream(self, endpoint: str) -> None:
        """Apply what one node's stream tells, until it ends."""
        call = self._directory.open_stream(endpoint, self.info.routing.version, self._paused)
        with self._lock:
            self._stream, self._stream_endpoint = call, endpoint
        if self._closing.is_set():
            call.cancel()
        try:
            for info in self._directory.read_stream(endpoint, call):
                self.apply(info)
                # Only the node that is watched is asked: another one may be behind, and would
                # not say a second time that a pause is over.
                if info.cluster_uid == self.info.cluster_uid:
                    self._pause(info.paused)
        finally:
            with self._lock:
                self._stream = None

    @staticmethod
    def _next_after(last: str, endpoints: list[str]) -> str:
        if last not in endpoints:
            return endpoints[0]
        return endpoints[(endpoints.index(last) + 1) % len(endpoints)]

    def _cancel_stream(self) -> None:
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()

    # -- the native client's events -------------------------------------------------------

    def _listen(self) -> None:
        """Hear what the native client has to say, until it is closed."""
        while (event := self._native.next_event()) is not None:
            kind, text = event
            if kind == "trouble":
                self._look()
                continue
            _LOG.log(logging.WARNING if kind == "waiting" else logging.INFO, "%s", text)
            self._tell_hook(text)

    def _look(self) -> None:
        """A server does not answer: ask the nodes whether the cluster has changed."""
        if self._ask_another_node():
            self._looks.reset()
            return
        # Events that come meanwhile are one event: looking has a limit.
        self._closing.wait(self._looks.next_s())

    def _ask_another_node(self) -> bool:
        """Ask the next node that is not the watched one; return whether there was news."""
        with self._lock:
            watched = self._stream_endpoint if self._stream is not None else ""
        known = self._native.routing_version
        for _ in range(2):
            endpoint = self._directory.next_endpoint(but=watched)
            try:
                info = self._directory.ask(endpoint, deadline_ms=_LOOK_DEADLINE_MS)
            except BackstayError as error:
                _LOG.debug("asked %s about the cluster: %s", endpoint, error)
                continue
            if self.apply(info):
                # The watched node has not told: it may hang, so listen to another one.
                _LOG.debug("%s knew a newer routing than %s told", endpoint, watched)
                self._cancel_stream()
                return True
            break
        # The stream may have told meanwhile.
        return self._native.routing_version > known
