"""Starts the nodes that a plan waits for, and cleans up after nodes that have ended.

A plan asks for a number of nodes; it does not know where they come from. Without a provisioner an
operator starts them, within the time that the plan gives. ``LocalCluster`` has one for processes of
this machine; another kind of cluster needs another class of the same shape. Imports
``pserver.resizing``, and knows no kind of cluster.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Protocol

from backstay.config import ClientConfig
from backstay.consensus.records.plans import ResizePlan
from backstay.errors import BackstayError
from backstay.pserver.resizing import ClusterResizing

__all__ = ["PlanProvider", "Provisioner", "provision"]

POLL_PAUSE_S = 0.25
JOIN_S = 10.0

log = logging.getLogger(__name__)


class Provisioner(Protocol):
    """Starts nodes, and notes which nodes were told to end."""

    def running(self) -> int:
        """Return how many nodes run or are being started."""

    def start(self, count: int) -> None:
        """Start so many further nodes.

        Raises:
            BackstayError: They did not start.
        """

    def ended(self, node_ids: Collection[str]) -> None:
        """Clean up after these nodes, which a plan that is done has told to end."""


def provision(plan: ResizePlan, provisioner: Provisioner) -> None:
    """Do what a plan needs now: start missing nodes, or clean up after ended ones.

    Called again and again; what has been done once is seen by ``running``.

    Raises:
        BackstayError: Nodes did not start.
    """
    if plan.state == "waiting_for_nodes":
        missing = plan.nodes - provisioner.running()
        if missing > 0:
            provisioner.start(missing)
    elif plan.state == "done" and plan.stop:
        provisioner.ended([one.node_id for one in plan.leaving])


class PlanProvider:
    """Provides for the plans of a cluster in a thread, from ``with`` to its end."""

    def __init__(
        self,
        endpoints: Callable[[], Sequence[str]],
        provisioner: Provisioner,
        config: ClientConfig,
    ) -> None:
        """Prepare.

        Args:
            endpoints: Returns the control addresses of the nodes, which a resize changes.
            provisioner: Starts nodes of that cluster.
            config: Deadlines, token and certificates.
        """
        self._endpoints = endpoints
        self._config = config
        self._provisioner = provisioner
        self._stopping = threading.Event()
        # A daemon: a server that does not start must not keep the process alive.
        self._thread = threading.Thread(target=self._follow, name="plans", daemon=True)

    def __enter__(self) -> PlanProvider:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.join(JOIN_S)

    def _follow(self) -> None:
        said = ""
        while not self._stopping.wait(POLL_PAUSE_S):
            try:
                with ClusterResizing(",".join(self._endpoints()), self._config) as resizing:
                    plan = resizing.plan()
                if plan is not None and not self._stopping.is_set():
                    provision(plan, self._provisioner)
            except BackstayError as error:
                # Servers may be down for a while: that is for their logs.
                if str(error) != said:
                    said = str(error)
                    log.warning("plans cannot be followed: %s", said)
