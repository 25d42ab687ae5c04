"""Calls and watches at one of several members: the next one if it does not answer.

The etcd client and the client of the embedded store share it. What an error of gRPC means is
theirs to say (``Classify``); when to try again, and where, is decided here. A write that may
have arrived is never sent a second time. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from grpc import aio

from backstay.backoff import Backoff
from backstay.consensus.store import Watch, WatchBatch
from backstay.errors import BackstayError, ClosedError, StoreUnavailable

__all__ = ["Failure", "Members", "ResumingWatch"]

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

RETRY = Backoff(first_s=0.05, longest_s=0.5)
# With several members, a call that can be repeated moves on to the next after this share of the
# deadline at the latest.
ATTEMPT_MIN_S = 0.25


@dataclass(frozen=True)
class Failure:
    """What an error of a call means.

    Attributes:
        error: What to raise if nothing helps.
        elsewhere: Whether another member, or the same one later, may do better.
        applied: Whether the request may have been carried out.
    """

    error: BackstayError
    elsewhere: bool = False
    applied: bool = False


Classify = Callable[[aio.AioRpcError, str], Failure]


class Members:
    """The members of a store as one client knows them, and which one it uses now."""

    def __init__(
        self,
        endpoints: Sequence[str],
        open_channel: Callable[[str], aio.Channel],
        classify: Classify,
        deadline_ms: int,
    ) -> None:
        """Prepare; nothing is connected yet."""
        self._endpoints = tuple(endpoints)
        self._open_channel = open_channel
        self._classify = classify
        self._deadline_s = deadline_ms / 1000
        self._channels: dict[str, aio.Channel] = {}
        self._at = 0
        self._closed = asyncio.Event()
        self._fatal: BackstayError | None = None

    @property
    def current(self) -> str:
        """The endpoint in use."""
        return self._endpoints[self._at]

    @property
    def closed(self) -> asyncio.Event:
        """Set when there will be no more answers: closed, or broken for good."""
        return self._closed

    def check_usable(self) -> None:
        """Raise why there will be no more answers, if that is so."""
        if self._fatal is not None:
            raise type(self._fatal)(str(self._fatal))
        if self._closed.is_set():
            raise ClosedError("the store was closed")

    def fail(self, error: BackstayError) -> None:
        """Give up for good: every call and watch raises this error from now on."""
        if self._fatal is None:
            self._fatal = error
            self._closed.set()

    def channel(self, endpoint: str) -> aio.Channel:
        """Return the channel to an endpoint."""
        if endpoint not in self._channels:
            self._channels[endpoint] = self._open_channel(endpoint)
        return self._channels[endpoint]

    def avoid(self, endpoint: str) -> None:
        """Go on to the next endpoint, unless another call has done so already."""
        if self.current == endpoint:
            self._at = (self._at + 1) % len(self._endpoints)

    def classify(self, error: aio.AioRpcError, endpoint: str) -> Failure:
        """Say what an error means."""
        return self._classify(error, endpoint)

    async def call(
        self,
        attempt: Callable[[str, aio.Channel, float], Awaitable[T]],
        *,
        repeatable: bool,
        deadline_ms: int | None = None,
    ) -> T:
        """Make a call within the deadline.

        Args:
            attempt: The call, given endpoint, channel and timeout in seconds.
            repeatable: Whether it does no harm to send it again when it may have arrived.
            deadline_ms: Another deadline than the usual one.

        Raises:
            StoreUnavailable: No member answered in time.
            BackstayError: What the answer says.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + (self._deadline_s if deadline_ms is None else deadline_ms / 1000)
        reasons: dict[str, str] = {}
        retries = RETRY.begin(until_s=deadline)
        while True:
            self.check_usable()
            endpoint = self.current
            timeout_s = max(deadline - now(), 0.001)
            if repeatable and len(self._endpoints) > 1:
                timeout_s = min(timeout_s, max(ATTEMPT_MIN_S, self._deadline_s / 4))
            try:
                return await attempt(endpoint, self.channel(endpoint), timeout_s)
            except aio.AioRpcError as error:
                failure = self._classify(error, endpoint)
                if not failure.elsewhere:
                    raise failure.error from error
            self.check_usable()
            self.avoid(endpoint)
            is_new = endpoint not in reasons
            reasons[endpoint] = str(failure.error)
            tried = "; ".join(reasons.values())
            if failure.applied and not repeatable:
                raise StoreUnavailable(f"{tried} (it is not known whether the write happened)")
            # Another member that was not asked yet is asked at once.
            has_others = is_new and len(reasons) < len(self._endpoints)
            pause_s = 0.0 if has_others else retries.next_s()
            if retries.is_over(now()):
                raise StoreUnavailable(f"the coordination store does not answer: {tried}")
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Let go of all channels."""
        self._closed.set()
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close()


OpenStream = Callable[[str, aio.Channel, int], AsyncGenerator[WatchBatch | None, None]]


class ResumingWatch(Watch):
    """A watch over a stream of one member, opened again at another one when it breaks."""

    def __init__(
        self, members: Members, open_stream: OpenStream, start_revision: int, silence_s: float
    ) -> None:
        """Begin.

        Args:
            members: Where to open streams.
            open_stream: Opens one at an endpoint from a revision on. It yields batches, and None
                as a sign of life.
            start_revision: The first revision wanted.
            silence_s: A stream without any sign for longer than this is broken.
        """
        self._members = members
        self._open_stream = open_stream
        self._next = start_revision
        self._silence_s = silence_s
        self._stream: AsyncGenerator[WatchBatch | None, None] | None = None
        self._endpoint = ""
        self._retries = RETRY.begin()
        self._closed = asyncio.Event()

    async def __anext__(self) -> WatchBatch:
        """Wait for the next batch, over as many streams as it takes."""
        while True:
            self._members.check_usable()
            if self._closed.is_set():
                raise ClosedError("the watch was closed")
            if self._stream is None:
                await asyncio.sleep(self._retries.pause_s)
                self._endpoint = self._members.current
                channel = self._members.channel(self._endpoint)
                self._stream = self._open_stream(self._endpoint, channel, self._next)
            try:
                batch = await self._step(self._stream)
            except aio.AioRpcError as error:
                failure = self._members.classify(error, self._endpoint)
                await self._drop_stream(str(failure.error))
                if not failure.elsewhere:
                    raise failure.error from error
            except (asyncio.TimeoutError, StopAsyncIteration):
                await self._drop_stream(f"{self._endpoint}: no sign of life")
            else:
                self._retries.reset()
                # What lies below was seen before the stream broke.
                if batch is not None and batch.revision >= self._next:
                    self._next = batch.revision + 1
                    return batch

    async def aclose(self) -> None:
        """End the watch."""
        self._closed.set()
        await self._drop_stream(None)

    async def _step(self, stream: AsyncGenerator[WatchBatch | None, None]) -> WatchBatch | None:
        """Return the stream's next batch; end early when watch or store are closed."""
        step = asyncio.ensure_future(anext(stream))
        ends = [asyncio.ensure_future(over.wait()) for over in (self._closed, self._members.closed)]
        try:
            await asyncio.wait(
                [step, *ends], timeout=self._silence_s, return_when=asyncio.FIRST_COMPLETED
            )
            if step.done():
                return step.result()
            if any(end.done() for end in ends):
                return None
            raise asyncio.TimeoutError
        finally:
            for task in (step, *ends):
                task.cancel()
            # A generator must not be closed while a step of it still runs.
            await asyncio.gather(step, *ends, return_exceptions=True)

    async def _drop_stream(self, reason: str | None) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()
        if reason is not None:
            level = logging.WARNING if self._retries.pause_s == 0 else logging.DEBUG
            _LOG.log(level, "watch: %s; resuming from revision %d", reason, self._next)
            self._members.avoid(self._endpoint)
            self._retries.next_s()
