"""Errors of this package survive the trip through a gRPC status."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from backstay import errors, rpc
from backstay.errors import BackstayError


class FailedCall(grpc.RpcError):
    """What grpcio raises, as far as the mapping looks at it."""

    def __init__(
        self,
        code: grpc.StatusCode,
        details: str | None = "details",
        metadata: tuple[tuple[str, str], ...] | None = None,
    ) -> None:
        self._status = (code, details, metadata)

    def code(self) -> grpc.StatusCode:
        return self._status[0]

    def details(self) -> str | None:
        return self._status[1]

    def trailing_metadata(self) -> Any:
        return self._status[2]


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_comes_out_as_it_went_in(name: str) -> None:
    kind: type[BackstayError] = getattr(errors, name)
    code, text, metadata = rpc.status_of(kind("table 'x' is wrong"))
    assert code is not grpc.StatusCode.OK
    failed = FailedCall(code, text, metadata)
    with pytest.raises(kind) as raised, rpc.mapped_errors("h:1"):
        raise failed
    assert type(raised.value) is kind
    assert str(raised.value) == "h:1: table 'x' is wrong"
    # A refusal says it all: a traceback shows none of gRPC's pages before it.
    is_refusal = issubclass(kind, errors.RequestRefused)
    assert raised.value.__cause__ is (None if is_refusal else failed)
    assert raised.value.__suppress_context__


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.ServerUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.LimitExceeded),
        (grpc.StatusCode.CANCELLED, errors.ServerUnavailable),
        (grpc.StatusCode.UNIMPLEMENTED, errors.ProtocolError),
        (grpc.StatusCode.UNKNOWN, errors.ProtocolError),
    ],
)
def test_a_status_of_another_program_is_told_by_its_code(
    code: grpc.StatusCode, kind: type[BackstayError]
) -> None:
    for details in ("details", None):
        with pytest.raises(kind, match="h:1"), rpc.mapped_errors("h:1"):
            raise FailedCall(code, details)


@pytest.mark.parametrize(
    "details",
    [
        "Locally cancelled by application!",
        "Channel closed!",
        "Stream removed (Channel closed!)",
        "Channel deallocated!",
    ],
)
def test_a_call_that_this_process_cancelled_is_closed(details: str) -> None:
    with pytest.raises(errors.ClosedError), rpc.mapped_errors("h:1"):
        raise FailedCall(grpc.StatusCode.CANCELLED, details)


REFUSED = "ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused"
NOT_HTTP = "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 89)"


@pytest.mark.parametrize(
    ("details", "says"),
    [
        (
            f"failed to connect to all addresses; last error: UNKNOWN: {REFUSED}",
            "no pserver answers at h:1 (connection refused); is `pserver serve` running there?",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:1: Odd",
            "no pserver answers at h:1 (Odd); is `pserver serve` running there?",
        ),
        (
            "errors resolving h:1: [field:hostname lookup error:address lookup failed]",
            "no pserver answers at h:1 (the name does not resolve); is the address right?",
        ),
        ("GOAWAY", "no pserver answers at h:1 (GOAWAY); is `pserver serve` running there?"),
    ],
)
def test_what_grpc_says_about_a_failed_connection_is_said_once(details: str, says: str) -> None:
    with pytest.raises(errors.ServerUnavailable) as raised, rpc.mapped_errors("h:1"):
        raise FailedCall(grpc.StatusCode.UNAVAILABLE, details)
    assert str(raised.value) == says


def test_a_port_that_speaks_something_else_is_told() -> None:
    details = f"failed to connect to all addresses; last error: UNAVAILABLE: {NOT_HTTP}"
    with pytest.raises(errors.ProtocolError) as raised, rpc.mapped_errors("h:1"):
        raise FailedCall(grpc.StatusCode.UNAVAILABLE, details)
    assert str(raised.value) == ("h:1 answers, but not as a control plane: is it the data port?")


def test_a_class_name_that_is_not_ours_is_not_trusted() -> None:
    metadata = ((rpc.ERROR_KEY, "SystemExit"),)
    with pytest.raises(errors.ServerUnavailable), rpc.mapped_errors("h:1"):
        raise FailedCall(grpc.StatusCode.UNAVAILABLE, "x", metadata)


def test_a_long_message_is_cut() -> None:
    text = rpc.status_of(errors.TableConflict("x" * 10_000))[1]
    assert len(text) == rpc.ERROR_TEXT_MAX
    assert text.endswith(" ...")


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(ZeroDivisionError), rpc.mapped_errors("h:1"):
        raise ZeroDivisionError
