"""The gRPC server of a node or of a job master: where it listens, who may call, how errors leave.

Services are added to it from outside; it knows none of them. A service is added when what it needs
exists, before or after ``start``; until then its calls are refused with an error that the owner
names. Health checks need no token, so that Kubernetes and load balancers can probe a node; they
reveal nothing but whether it serves.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from backstay import rpc
from backstay.addresses import split_address
from backstay.config import Pems
from backstay.errors import BackstayError, ListenError, Unauthenticated

__all__ = ["ControlServer", "Listening"]

# Each trainer and each peer keeps a stream open, besides its calls; each of a job's 20,000 workers
# has a call stream.
CONCURRENT_CALLS_MAX = 50_000
PING_INTERVAL_MIN_MS = 10_000
HEALTH_METHODS = f"/{health.SERVICE_NAME}/"

_OPTIONS = (
    *rpc.CHANNEL_OPTIONS,
    # Two servers on one port would each get some of the calls; the second must fail instead.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MIN_MS),
    # By itself gRPC cancels calls at random when 1000 wait to be taken up, and all when 3000 do:
    # a job's workers come all at once when its job master has been away.
    ("grpc.server.max_pending_requests", CONCURRENT_CALLS_MAX),
    ("grpc.server.max_pending_requests_hard_limit", CONCURRENT_CALLS_MAX),
)


class Listening(Protocol):
    """The settings that a control server needs; those of a node have them."""

    @property
    def listen_control(self) -> str:
        """``host:port`` to listen on; port 0 lets the system choose."""

    @property
    def token(self) -> str | None:
        """What every caller must show; None: nothing."""

    @property
    def tls_require_client_cert(self) -> bool:
        """Whether callers must show a certificate."""

    def read_pems(self) -> Pems:
        """Read the certificate files; TLS is on if there is a certificate."""


class ControlServer:
    """A gRPC server with health, reflection, token check and error mapping."""

    def __init__(self, config: Listening) -> None:
        """Bind the control address; call it while the event loop runs.

        Raises:
            ListenError: The address cannot be listened on.
            ConfigError: A certificate file cannot be read or used.
        """
        interceptors: list[aio.ServerInterceptor] = [_RaisedErrors()]
        if config.token is not None:
            interceptors.insert(0, _TokenCheck(config.token))
        self._server = aio.server(
            interceptors=interceptors,
            options=_OPTIONS,
            maximum_concurrent_rpcs=CONCURRENT_CALLS_MAX,
        )
        self._health = health.aio.HealthServicer()
        self._services = _Services()
        self._service_names: list[str] = []
        host = split_address("listen_control", config.listen_control)[0]
        self.address = f"{host}:{self._bind(config)}"

    @property
    def services(self) -> Any:
        """What services are added to, by the functions of the generated code, at any time."""
        return self._services

    async def start(self, service_names: list[str], not_yet: BackstayError | None = None) -> None:
        """Answer calls. Health says NOT_SERVING until ``set_serving``.

        Args:
            service_names: The full names of the services that are there, or will be added.
            not_yet: What a call of one that is not added yet is refused with; None: all are added.
        """
        if not_yet is not None:
            self._services.refuse(service_names, not_yet)
        self._server.add_generic_rpc_handlers([self._services])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        # The empty name stands for the node as a whole.
        self._service_names = ["", *service_names]
        for name in self._service_names:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    async def set_serving(self) -> None:
        """Let the health checks say SERVING."""
        for name in self._service_names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def set_not_serving(self) -> None:
        """Let the health checks say NOT_SERVING for good."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, let those under way finish for ``grace_s``, close."""
        await self._server.stop(grace_s)

    def _bind(self, config: Listening) -> int:
        pems = config.read_pems()
        # gRPC says why it cannot listen on standard error only, in its own words; asking the
        # system first leaves it nothing to say.
        _check_free(config.listen_control)
        try:
            if pems.cert is None or pems.key is None:
                return self._server.add_insecure_port(config.listen_control)
            credentials = grpc.ssl_server_credentials(
                [(pems.key, pems.cert)],
                root_certificates=pems.ca if config.tls_require_client_cert else None,
                require_client_auth=config.tls_require_client_cert,
            )
            return self._server.add_secure_port(config.listen_control, credentials)
        except RuntimeError as error:
            raise ListenError(
                f"listen_control: cannot listen on {config.listen_control}: the port is in use by "
                "another process, or the address is not one of this machine"
                + ("" if pems.cert is None else ", or certificate and key do not fit")
            ) from error


def _check_free(address: str) -> None:
    """Make sure that the address can be bound now.

    Raises:
        ListenError: It cannot; the message says why.
    """
    host, port = split_address("listen_control", address)
    try:
        places = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        failure: OSError | None = None
        for family, kind, protocol, _, place in places:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    # SO_REUSEADDR, as gRPC does: connections that have just ended do not count.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(place)
            except OSError as error:
                failure = error
            else:
                return  # One of a name's addresses is enough for gRPC, too.
    except OSError as error:
        failure = error
    if failure is not None:
        why = failure.strerror or str(failure)
        raise ListenError(f"listen_control: cannot listen on {address}: {why}") from failure


class _Services(grpc.GenericRpcHandler):
    """The methods of services that may be added while the server runs."""

    def __init__(self) -> None:
        self._methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._refused: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Do nothing: generated code registers the same methods by name, too."""

    def add_registered_method_handlers(
        self, service: str, methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Add a service."""
        self._methods |= {f"/{service}/{name}": handler for name, handler in methods.items()}

    def refuse(self, services: Iterable[str], error: BackstayError) -> None:
        """Refuse each call of these services whose method is not there."""
        self._refused = dict.fromkeys(services, _refusing(error))

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return what answers a call."""
        service = details.method.rpartition("/")[0].lstrip("/")
        return self._methods.get(details.method) or self._refused.get(service)


class _TokenCheck(aio.ServerInterceptor):
    """Refuses calls that do not show the token, before any service sees them."""

    def __init__(self, token: str) -> None:
        self._expected = rpc.bearer(token).encode()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH_METHODS):
            return handler
        shown = b""
        for key, value in handler_call_details.invocation_metadata or ():
            if key == rpc.AUTHORIZATION_KEY:
                shown = value.encode() if isinstance(value, str) else value
        if hmac.compare_digest(shown, self._expected):
            return handler
        what = "wrong token" if shown else "no token"
        return _refusing(Unauthenticated(f"{what}; set BACKSTAY_TOKEN or the config's token"))


class _RaisedErrors(aio.ServerInterceptor):
    """Sends an error of this package that a service raises to the caller."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is not None and handler.unary_stream is not None:
            return _guarded_stream(handler)
        if handler is None or handler.unary_unary is None:
            return handler
        serve: Any = handler.unary_unary

        async def guarded(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await serve(request, context)
            except BackstayError as error:
                code, text, metadata = rpc.status_of(error)
                return await context.abort(code, text, metadata)

        return grpc.unary_unary_rpc_method_handler(
            guarded,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _guarded_stream(handler: grpc.RpcMethodHandler[Any, Any]) -> Any:
    """Return the handler of a stream of answers that sends an error of ours to the caller."""
    serve: Any = handler.unary_stream

    async def guarded(request: Any, context: aio.ServicerContext[Any, Any]) -> None:
        try:
            answers = serve(request, context)
            if not hasattr(answers, "__aiter__"):
                # Written as a coroutine that sends for itself, as the health service is.
                await answers
                return
            async for answer in answers:
                await context.write(answer)
        except BackstayError as error:
            code, text, metadata = rpc.status_of(error)
            await context.abort(code, text, metadata)

    return grpc.unary_stream_rpc_method_handler(
        guarded,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _refusing(error: BackstayError) -> Any:
    """Return a handler that refuses every call, whatever its shape."""
    code, text, metadata = rpc.status_of(error)

    async def refuse(_requests: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(code, text, metadata)

    # Of a stream nothing need be read, so this fits a single request, too.
    return grpc.stream_stream_rpc_method_handler(refuse)
