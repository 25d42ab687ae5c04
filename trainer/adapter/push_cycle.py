"""What a step of every framework's ``DistributedOptimizer`` does: push, wait, load.

May import the client and this package's framework-neutral parts. It computes no update: the
servers do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from backstay.errors import BackstayError
from backstay.trainer.adapter.dense import DenseGroup
from backstay.trainer.adapter.server_rows import ServerRows
from backstay.trainer.client import Client
from backstay.trainer.pending import Pending

__all__ = ["PushCycle"]


class PushCycle:
    """Sends the gradients of one optimizer's parameters and loads what the servers made of them.

    Invariant: when ``step`` returns, pushes of at most ``steps_in_flight`` steps are under way.

    Args:
        client: Connected.
        embeddings: Each with the number of the learning rate that it follows.
        dense: The dense parameters.
        steps_in_flight: 0: ``step`` returns with values that contain it. n: pushes of up to n
            steps stay under way, and the values loaded are those asked for a step before.
    """

    def __init__(
        self,
        client: Client,
        embeddings: Sequence[tuple[ServerRows, int]],
        dense: Sequence[DenseGroup],
        steps_in_flight: int,
    ) -> None:
        self._client = client
        self._embeddings = list(embeddings)
        self._dense = list(dense)
        self._steps_in_flight = steps_in_flight
        self._pushes: deque[list[Pending[None]]] = deque()
        self._fresh: list[Pending[NDArray[np.float32]]] = []

    @property
    def table_names(self) -> tuple[str, ...]:
        """The tables that this optimizer pushes to, in the order in which they were made."""
        rows = (layer.table_name for layer, _ in self._embeddings)
        return (*rows, *(group.table_name for group in self._dense))

    def begin_step(
        self,
        take_dense: Callable[[], Mapping[str, NDArray[np.float32]]],
        scales: Sequence[float],
        clicks: NDArray[np.float32] | None = None,
    ) -> bool:
        """Send all gradients since the last step; ``end_step`` belongs to it.

        Args:
            take_dense: Returns the gradients of the dense parameters by name, which are then the
                cycle's. Called once, when those of the embeddings are on their way.
            scales: By number, what each learning rate is now over the one in the tables.
            clicks: Of each example, for tables that keep shows and clicks; None: not told.

        Returns:
            Whether there was a gradient; if not, there is nothing to end.

        Raises:
            BackstayError: A push was refused before it left.
        """
        pushes: list[Pending[None]] = []
        # Listed before anything is sent: if a later table refuses, `_wait` still waits for the
        # pushes that have left.
        self._pushes.append(pushes)
        for layer, rate in self._embeddings:
            taken = layer.take_gradients(clicks)
            if taken is not None:
                pushes.append(
                    self._client.push_async(
                        taken.table,
                        taken.keys,
                        taken.gradients,
                        learning_rate_scale=scales[rate],
                        shows=taken.shows,
                        clicks=taken.clicks,
                    )
                )
        gradients = take_dense()
        for group in self._dense:
            push = group.push_async(gradients, scales[group.rate])
            if push is not None:
                pushes.append(push)
        if not pushes:
            self._pushes.pop()
        return bool(pushes)

    def end_step(self) -> None:
        """Wait as far as ``steps_in_flight`` asks for it, and load fresh dense values.

        Raises:
            BackstayError: A push of this step, or with ``steps_in_flight`` of an earlier one,
                failed.
        """
        self._wait(self._steps_in_flight)
        fresh, self._fresh = self._fresh, [group.pull_async() for group in self._dense]
        if self._steps_in_flight == 0:
            fresh, self._fresh = self._fresh, []
        self._load(fresh)

    def synchronize(self) -> None:
        """Wait for every push, then load the dense values as they are now."""
        self._wait(0)
        self._fresh = []
        self._load([group.pull_async() for group in self._dense])

    def abandon(self) -> int:
        """Forget gradients, rows fetched ahead and every push; return how many of these failed.

        What was sent may have been applied: this only makes the next step begin without it.
        """
        self.discard_gradients()
        for layer, _ in self._embeddings:
            layer.discard_prefetched()
        self._fresh = []
        failed = 0
        while self._pushes:
            for push in self._pushes.popleft():
                try:
                    push.result()
                except BackstayError:  # else the client would raise it when it is flushed
                    failed += 1
        return failed

    def discard_gradients(self) -> None:
        """Forget the gradients of the embeddings."""
        for layer, _ in self._embeddings:
            layer.discard_gradients()

    def _wait(self, steps_left: int) -> None:
        while len(self._pushes) > steps_left:
            for push in self._pushes.popleft():
                push.result()

    def _load(self, fresh: list[Pending[NDArray[np.float32]]]) -> None:
        for group, values in zip(self._dense, fresh, strict=False):
            group.load(values.result())
