"""gRPC as this package uses it: channels, credentials, limits, and errors there and back.

A server raises an error of ``backstay.errors``; it travels as a status code plus the class's
name in the trailing metadata, and is raised again at the caller. Both directions of that
mapping are here and nowhere else. Used by servers, trainers and commands; imports
``backstay.config`` and ``backstay.errors`` only, and starts no thread of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from grpc import aio

from backstay import errors
from backstay.config import SecurityConfig
from backstay.errors import BackstayError

__all__ = [
    "AUTHORIZATION_KEY",
    "CHANNEL_OPTIONS",
    "ERROR_KEY",
    "bearer",
    "mapped_errors",
    "named_error",
    "open_aio_channel",
    "open_channel",
    "status_of",
]

ERROR_KEY = "backstay-error"
AUTHORIZATION_KEY = "authorization"
# 10,000 tables of 1 KB each, or the routing of 65,536 slots over 1,000 nodes, fit in well.
MESSAGE_BYTES_MAX = 33_554_432
KEEPALIVE_INTERVAL_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
RECONNECT_BACKOFF_MIN_MS = 50
RECONNECT_BACKOFF_MAX_MS = 2_000
# gRPC refuses to carry much more than this in a status.
ERROR_TEXT_MAX = 4_000

CHANNEL_OPTIONS: Sequence[tuple[str, int | str]] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # A process that comes back is seen soon; gRPC's own default waits up to two minutes.
    ("grpc.min_reconnect_backoff_ms", RECONNECT_BACKOFF_MIN_MS),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_MIN_MS),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MAX_MS),
    # Channels of one process to one address share a connection unless told otherwise, and with
    # it the state "cannot connect" that another one has left behind.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's own retries lose the end of a stream whose server stops at that moment: the reader
    # waits for ever (seen with grpcio 1.85). Callers retry, and know what is safe to repeat.
    ("grpc.enable_retries", 0),
    # A proxy meant for web traffic must not get in between.
    ("grpc.enable_http_proxy", 0),
)

_CODE_OF_ERROR: Mapping[type[BackstayError], grpc.StatusCode] = {
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NonFiniteGradient: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownTable: grpc.StatusCode.NOT_FOUND,
    errors.TableConflict: grpc.StatusCode.ALREADY_EXISTS,
    errors.SettingsChanged: grpc.StatusCode.ABORTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.MemoryLimitReached: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ResizeRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ExportRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotMaster: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Stopping: grpc.StatusCode.UNAVAILABLE,
    errors.ServerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.StoreUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.StoreAuthError: grpc.StatusCode.UNAUTHENTICATED,
    errors.StoreDataLost: grpc.StatusCode.DATA_LOSS,
    errors.LeaseLost: grpc.StatusCode.NOT_FOUND,
    errors.WatchLost: grpc.StatusCode.OUT_OF_RANGE,
    errors.CheckpointNotFound: grpc.StatusCode.NOT_FOUND,
    errors.CheckpointRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NoCheckpointFolder: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CheckpointDamaged: grpc.StatusCode.DATA_LOSS,
    errors.CheckpointUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.StateLost: grpc.StatusCode.DATA_LOSS,
    errors.JobRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnknownJob: grpc.StatusCode.NOT_FOUND,
    errors.NotJobMaster: grpc.StatusCode.UNAVAILABLE,
    errors.NotLeading: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WorkerReplaced: grpc.StatusCode.ABORTED,
    errors.TaskFailed: grpc.StatusCode.ABORTED,
}

# A status without a class name comes from gRPC itself or from another program.
_ERROR_OF_CODE: Mapping[grpc.StatusCode, type[BackstayError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.ServerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.LimitExceeded,
    grpc.StatusCode.CANCELLED: errors.ClosedError,
}

# How gRPC says that this process has cancelled the call, and not the server. A call under way says
# it in brackets: "Stream removed (Channel closed!)".
_CANCELLED_HERE = re.compile("Locally cancelled|Channel closed|Channel deallocated")

# gRPC says the same thing several times: that it could not connect, and where, which the address
# in our message tells already.
_GRPC_PREFIX = re.compile(
    r"^(failed to connect to all addresses; last error: )?([A-Z_]+: )?(ipv[46]:\S+: )?"
    r"(Failed to connect to remote host: )?"
)
_SIGNS_OF_ANOTHER_PROTOCOL = (
    "Expected SETTINGS frame",
    "missing selected ALPN property",
)
_START_IT = "is `pserver serve` running there?"
# What gRPC's text holds, what that means, and what to look at.
_UNAVAILABLE_REASONS = (
    ("Connection refused", "connection refused", _START_IT),
    ("hostname lookup", "the name does not resolve", "is the address right?"),
    ("errors resolving", "the name does not resolve", "is the address right?"),
    ("No route to host", "no route to host", "is the address right?"),
    (
        "timed out before receiving SETTINGS",
        "it takes the connection and says nothing",
        "does the process hang, or is it another program?",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "it does not speak TLS",
        "tls_ca_file turns TLS on here: is it on there?",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is not trusted",
        "is tls_ca_file the authority that issued it?",
    ),
    (
        "Hostname Verification Check failed",
        "its certificate has another name",
        "does it name the host? Certificates of job masters and workers may name job_tls_name",
    ),
    (
        ": Socket closed",
        "it closed the connection",
        "does it want TLS (tls_ca_file), or is it another program's port?",
    ),
)

_ERROR_CLASSES: Mapping[str, type[BackstayError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, BackstayError)
}


def bearer(token: str) -> str:
    """Return the value under which a token travels in the ``authorization`` metadata."""
    return f"Bearer {token}"


def open_channel(
    address: str, security: SecurityConfig, *, tls_name: str | None = None
) -> grpc.Channel:
    """Return a channel to a control address; it connects when it is first used.

    Args:
        address: Of the server.
        security: Token and TLS.
        tls_name: Name that the server's certificate must have; default: the host of the address.

    Raises:
        ConfigError: A certificate file cannot be read.
    """
    credentials = _credentials(security)
    if credentials is None:
        channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    else:
        name = [("grpc.ssl_target_name_override", tls_name)] if tls_name is not None else []
        channel = grpc.secure_channel(address, credentials, options=[*CHANNEL_OPTIONS, *name])
    if security.token is None:
        return channel
    return grpc.intercept_channel(channel, _SendToken(security.token))


def open_aio_channel(address: str, security: SecurityConfig) -> aio.Channel:
    """Return the same for asyncio; call it while the event loop runs.

    Raises:
        ConfigError: A certificate file cannot be read.
    """
    credentials = _credentials(security)
    interceptors = [_SendTokenAio(security.token)] if security.token is not None else None
    if credentials is None:
        return aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=interceptors)
    return aio.secure_channel(
        address, credentials, options=CHANNEL_OPTIONS, interceptors=interceptors
    )


@contextmanager
def mapped_errors(address: str) -> Iterator[None]:
    """Raise a gRPC failure inside the block as the error of ``backstay.errors`` that it stands for.

    Args:
        address: The peer's address, for the message.
    """
    try:
        yield
    except grpc.RpcError as error:
        meant = error_of(error, address)
        # A refusal says it all; gRPC's own pages about the call would only hide it.
        raise meant from (None if isinstance(meant, errors.RequestRefused) else error)


def error_of(error: grpc.RpcError, address: str) -> BackstayError:
    """Return the error that a failed call stands for.

    Every such error of grpcio is also the call, or the final status, and knows code, details
    and trailing metadata.
    """
    status: Any = error
    code: grpc.StatusCode = status.code()
    details: str = status.details() or code.name
    for key, value in status.trailing_metadata() or ():
        if key == ERROR_KEY and value in _ERROR_CLASSES:
            return named_error(str(value), details, address)
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unavailable(details, address)
    if code is grpc.StatusCode.CANCELLED and not _CANCELLED_HERE.search(details):
        return errors.ServerUnavailable(
            f"{address} broke the call off: it ends, or has too much to do"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"{address}: did not answer in time")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.ProtocolError(f"{address} is not a pserver of this version: {details}")
    kind = _ERROR_OF_CODE.get(code, errors.ProtocolError)
    return kind(f"{address}: {details}")


def named_error(name: str, text: str, address: str) -> BackstayError:
    """Return the error of a class that a server named.

    Args:
        name: Of the class; one that is not known here stands for ``ProtocolError``.
        text: Of the error.
        address: The peer's address, for the message.
    """
    return _ERROR_CLASSES.get(name, errors.ProtocolError)(f"{address}: {text}")


def _unavailable(details: str, address: str) -> BackstayError:
    """Return the error for a call that reached no server; ``details`` is gRPC's own text."""
    if any(sign in details for sign in _SIGNS_OF_ANOTHER_PROTOCOL):
        return errors.ProtocolError(
            f"{address} answers, but not as a control plane: is it the data port?"
        )
    for sign, reason, hint in _UNAVAILABLE_REASONS:
        if sign in details:
            return errors.ServerUnavailable(f"no pserver answers at {address} ({reason}); {hint}")
    reason = _GRPC_PREFIX.sub("", details)
    return errors.ServerUnavailable(f"no pserver answers at {address} ({reason}); {_START_IT}")


def status_of(error: BackstayError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return status code, text and trailing metadata under which an error travels."""
    kind = type(error)
    code = _CODE_OF_ERROR.get(kind, grpc.StatusCode.INTERNAL)
    text = str(error)
    if len(text) > ERROR_TEXT_MAX:
        text = text[: ERROR_TEXT_MAX - 4] + " ..."
    return code, text, ((ERROR_KEY, kind.__name__),)


def _credentials(security: SecurityConfig) -> grpc.ChannelCredentials | None:
    if security.tls_ca_file is None:
        return None
    pems = security.read_pems()
    return grpc.ssl_channel_credentials(
        root_certificates=pems.ca, private_key=pems.key, certificate_chain=pems.cert
    )


class _CallDetails(NamedTuple):
    """What grpcio wants back from an interceptor that changes a call's metadata."""

    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


# The token goes into the metadata of each call. gRPC's own call credentials would do the same,
# but they refuse to work without TLS, and a token alone is allowed on a guarded network.
class _SendToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, token: str) -> None:
        self._entry = (AUTHORIZATION_KEY, bearer(token))

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], client_call_details: Any, request: Any
    ) -> Any:
        return self._with_token(continuation, client_call_details, request)

    def intercept_unary_stream(
        self, continuation: Callable[[Any, Any], Any], client_call_details: Any, request: Any
    ) -> Any:
        return self._with_token(continuation, client_call_details, request)

    def intercept_stream_stream(
        self,
        continuation: Callable[[Any, Any], Any],
        client_call_details: Any,
        request_iterator: Any,
    ) -> Any:
        return self._with_token(continuation, client_call_details, request_iterator)

    def _with_token(
        self, continuation: Callable[[Any, Any], Any], client_call_details: Any, request: Any
    ) -> Any:
        details = _CallDetails(
            method=client_call_details.method,
            timeout=client_call_details.timeout,
            metadata=[*(client_call_details.metadata or ()), self._entry],
            credentials=client_call_details.credentials,
            wait_for_ready=client_call_details.wait_for_ready,
            compression=client_call_details.compression,
        )
        return continuation(details, request)


class _SendTokenAio(aio.UnaryUnaryClientInterceptor):
    def __init__(self, token: str) -> None:
        self._entry = (AUTHORIZATION_KEY, bearer(token))

    async def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], client_call_details: Any, request: Any
    ) -> Any:
        details = aio.ClientCallDetails(
            method=client_call_details.method,
            timeout=client_call_details.timeout,
            metadata=aio.Metadata(*(client_call_details.metadata or ()), self._entry),
            credentials=client_call_details.credentials,
            wait_for_ready=client_call_details.wait_for_ready,
        )
        return await continuation(details, request)
