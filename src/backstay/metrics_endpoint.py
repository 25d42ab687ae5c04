"""The HTTP endpoint of a node or a job master: ``GET /metrics`` for Prometheus, and checks.

Kubernetes' own gRPC probe knows no TLS, so a node also answers its checks here. All run on threads
of their own: a scrape never holds up the event loop. The module imports nothing of the package but
errors and addresses, and serves whatever collector and checks it is given.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

from backstay.addresses import split_address
from backstay.errors import ListenError

__all__ = ["Check", "MetricsEndpoint", "doubling_buckets"]

# Returns what is wrong; empty: nothing.
Check = Callable[[], str]

# A scrape is short, and few come at once: more than this is not a Prometheus.
REQUESTS_AT_ONCE_MAX = 8
REQUEST_TIMEOUT_S = 5.0


def doubling_buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return a Prometheus histogram's upper bounds, each with the count up to it.

    Args:
        counts: Of 0, of 1, of 2 to 3, of 4 to 7, and so on; the last one is of all above.
    """
    bounds = [*(str(2.0**number - 1) for number in range(len(counts) - 1)), "+Inf"]
    return list(zip(bounds, itertools.accumulate(counts), strict=True))


class _Handler(WSGIRequestHandler):
    # The limit of each read and write: a silent client does not keep its thread.
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the library's name)
        """Log nothing: a scrape is no news."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # A stop does not wait for a slow reader.
    block_on_close = False
    request_queue_size = 16

    def __init__(self, address: tuple[str, int]) -> None:
        self._places = threading.Semaphore(REQUESTS_AT_ONCE_MAX)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind, without asking the name service who we are, as the library would."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, if there is a place for one."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and give the place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a scraper that goes away in the middle is not this node's trouble."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class MetricsEndpoint:
    """Serves one collector, the figures of the process, and checks. A context manager."""

    def __init__(
        self, listen: str, collector: Collector, checks: Mapping[str, Check] | None = None
    ) -> None:
        """Bind the address.

        Args:
            listen: ``host:port``; port 0 lets the system choose.
            collector: What to serve.
            checks: By path. The answer is 200, or 503 with what is wrong.

        Raises:
            ListenError: It cannot be listened on.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        ProcessCollector(registry=registry)
        host, port = split_address("metrics", listen)
        kind = _Server6 if host.startswith("[") else _Server
        try:
            self._server = kind((host.strip("[]"), port))
        except OSError as error:
            raise ListenError(f"metrics: {listen}: {error.strerror or error}") from error
        self._server.set_app(_application(make_wsgi_app(registry), checks or {}))
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="metrics",
            daemon=True,
        )

    def __enter__(self) -> MetricsEndpoint:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _application(serve: Callable[..., Any], checks: Mapping[str, Check]) -> Callable[..., Any]:
    """Return an application with the metrics at one path, the checks at theirs, and no more."""

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path = str(environ.get("PATH_INFO", ""))
        is_get = environ["REQUEST_METHOD"] == "GET"
        if is_get and path == "/metrics":
            return serve(environ, start_response)
        if is_get and path in checks:
            wrong = checks[path]()
            status = "503 Service Unavailable" if wrong else "200 OK"
            text = wrong or "ok"
        else:
            status = "404 Not Found"
            text = "\n".join(f"GET {known}" for known in ("/metrics", *checks))
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    return application
