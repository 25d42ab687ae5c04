"""Channels to the nodes of a cluster, from outside: opened when needed, asked in turn, closed.

What ``inspection`` and ``resizing`` have in common. Imports ``backstay.rpc``; knows no service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

import grpc

from backstay import rpc
from backstay.addresses import parse_endpoints
from backstay.config import ClientConfig
from backstay.errors import BackstayError, ServerUnavailable

__all__ = ["AnswerT", "ClusterChannels"]

AnswerT = TypeVar("AnswerT")
ChannelsT = TypeVar("ChannelsT", bound="ClusterChannels")


class ClusterChannels:
    """The way to a cluster's nodes. A context manager; not thread-safe.

    Attributes:
        timeout_s: The usual limit of one call.
    """

    def __init__(self, endpoints: str | Sequence[str], config: ClientConfig) -> None:
        """Prepare; nothing is sent yet.

        Args:
            endpoints: ``"host:port,host:port"``, or several such strings: nodes to try in turn.
            config: Deadlines, token and certificates.

        Raises:
            ConfigError: An endpoint is not of that form.
        """
        self._endpoints = list(parse_endpoints(endpoints))
        self._config = config
        self.timeout_s = config.connect_timeout_ms / 1000
        self._channels: dict[str, grpc.Channel] = {}

    def channel(self, address: str) -> grpc.Channel:
        """Return the channel to a node's control address; it connects when it is first used."""
        if address not in self._channels:
            self._channels[address] = rpc.open_channel(address, self._config)
        return self._channels[address]

    def first_answer(self, ask: Callable[[grpc.Channel], AnswerT]) -> AnswerT:
        """Return the answer of the first endpoint that gives one.

        Args:
            ask: Makes the call on a node's channel; ``timeout_s`` is the usual limit for it.
                The next endpoint is tried after an error that allows to ask again.

        Raises:
            BackstayError: What the call was refused with.
            ServerUnavailable: None of the endpoints answers; the message has each reason.
        """
        return self._ask_in_turn(ask)[1]

    def _ask_in_turn(self, ask: Callable[[grpc.Channel], AnswerT]) -> tuple[str, AnswerT]:
        """Return who answered, and the answer. See :meth:`first_answer`."""
        failures = []
        for endpoint in self._endpoints:
            try:
                with rpc.mapped_errors(endpoint):
                    return endpoint, ask(self.channel(endpoint))
            except BackstayError as error:
                if not error.retry_safe:
                    raise
                failures.append(str(error))
        raise ServerUnavailable("; ".join(failures))

    def close(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def __enter__(self: ChannelsT) -> ChannelsT:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
