"""Changing the nodes of a running cluster, from Python; ``pserverctl resize`` is made of it.

Example:
    >>> from backstay.pserver.resizing import resize
    >>> resize("127.0.0.1:7000", 5)

It asks any node; the cluster's controller does the work and goes on without a waiting caller, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from backstay import rpc
from backstay._proto.v1 import cluster_pb2, cluster_pb2_grpc, resize_pb2, resize_pb2_grpc
from backstay.config import ClientConfig
from backstay.consensus.records.messages import plan_from_message
from backstay.consensus.records.plans import ResizePlan
from backstay.errors import BackstayError, DeadlineExceeded, ResizeRefused
from backstay.pserver.client.channels import AnswerT, ClusterChannels

__all__ = ["ClusterResizing", "ProgressOfPlan", "resize"]

POLL_PAUSE_S = 0.1
# A node that is asked for a plan asks all the others how much memory they have.
REQUEST_LIMIT_S = 15.0
# How long all nodes may be silent while the caller waits for a plan.
SILENCE_LIMIT_S = 60.0

ProgressOfPlan = Callable[[ResizePlan], None]


class ClusterResizing(ClusterChannels):
    """Requests to change a cluster's nodes. A context manager; not thread-safe."""

    def __init__(self, endpoints: str | Sequence[str], config: ClientConfig | None = None) -> None:
        """Prepare; nothing is sent yet.

        Args:
            endpoints: ``"host:port,host:port"``, or several such strings: nodes to try in turn.
            config: Deadlines, token and certificates; by default as a client's.

        Raises:
            ConfigError: An endpoint is not of that form.
        """
        super().__init__(endpoints, config if config is not None else ClientConfig.load())
        self._given = tuple(self._endpoints)

    def resize(
        self, nodes: int, *, stop: bool = True, pause: bool = False, wait_s: int = 0
    ) -> ResizePlan:
        """Ask for so many nodes; returns as soon as it is planned.

        Args:
            nodes: Nodes that are to hold rows.
            stop: Whether leaving processes end when they are empty.
            pause: Whether trainers are to wait while copies move.
            wait_s: How long nodes that are missing are waited for; 0: 600 s.

        Raises:
            ResizeRefused: It cannot be done; the message says why.
            ServerUnavailable: No node answers, or none reaches the coordination store.
        """
        request = resize_pb2.ResizeRequest(nodes=nodes, stop=stop, pause=pause, wait_s=wait_s)
        return self._planned(lambda stub: stub.Resize(request, timeout=REQUEST_LIMIT_S))

    def drain(self, node_id: str, *, stop: bool = False, pause: bool = False) -> ResizePlan:
        """Ask for a node to hold nothing. Raises as ``resize``."""
        request = resize_pb2.DrainRequest(node_id=node_id, stop=stop, pause=pause)
        return self._planned(lambda stub: stub.Drain(request, timeout=REQUEST_LIMIT_S))

    def rebalance(self, *, pause: bool = False) -> ResizePlan:
        """Ask for copies and masters on all nodes, drained ones included. Raises as ``resize``."""
        request = resize_pb2.RebalanceRequest(pause=pause)
        return self._planned(lambda stub: stub.Rebalance(request, timeout=REQUEST_LIMIT_S))

    def cancel(self, plan_id: str = "") -> ResizePlan:
        """End the plan that is under way. Raises as ``resize``."""
        request = resize_pb2.CancelPlanRequest(plan_id=plan_id)
        return self._planned(lambda stub: stub.CancelPlan(request, timeout=REQUEST_LIMIT_S))

    def plan(self) -> ResizePlan | None:
        """Return the plan that was asked for last; None if there never was one."""
        answer = self._answer(
            lambda stub: stub.GetPlan(resize_pb2.GetPlanRequest(), timeout=self.timeout_s)
        )
        return plan_from_message(answer.plan) if answer.HasField("plan") else None

    def plan_and_repairs(self) -> tuple[ResizePlan | None, list[resize_pb2.Repair]]:
        """Return the plan that was asked for last, and the newest repairs, oldest first."""
        answer = self._answer(
            lambda stub: stub.GetPlan(resize_pb2.GetPlanRequest(), timeout=self.timeout_s)
        )
        plan = plan_from_message(answer.plan) if answer.HasField("plan") else None
        return plan, list(answer.repairs)

    def wait(
        self,
        plan: ResizePlan,
        *,
        timeout_s: float | None = None,
        progress: ProgressOfPlan | None = None,
    ) -> ResizePlan:
        """Wait until a plan is done.

        Args:
            plan: The plan, as it was returned.
            timeout_s: How long to wait at most; the plan itself goes on. None: without end.
            progress: Called with the plan each time that it has changed.

        Returns:
            The plan that is done.

        Raises:
            ResizeRefused: It has failed, was cancelled, or was followed by another plan.
            DeadlineExceeded: It is not done in time.
            ServerUnavailable: No server has answered for a minute.
        """
        started_s = heard_s = time.monotonic()
        said: ResizePlan | None = None
        while True:
            try:
                now = self.plan() or plan
                heard_s = time.monotonic()
            except BackstayError as error:
                if not error.retry_safe or time.monotonic() - heard_s > SILENCE_LIMIT_S:
                    raise
                now = said or plan
            if now.plan_id != plan.plan_id:
                raise ResizeRefused(f"the {plan.kind} was followed by another plan")
            if now != said:
                said = now
                if progress is not None:
                    progress(now)
            if now.state == "done":
                return now
            if not now.is_under_way:
                raise ResizeRefused(f"the {now.kind} {_ended(now)}")
            if timeout_s is not None and time.monotonic() - started_s >= timeout_s:
                raise DeadlineExceeded(
                    f"the {now.kind} is not done after {timeout_s:g} s and goes on: {now.reason}"
                )
            time.sleep(POLL_PAUSE_S)

    def _planned(
        self, ask: Callable[[resize_pb2_grpc.ResizeServiceStub], resize_pb2.PlanResponse]
    ) -> ResizePlan:
        # The node that is asked may be the one that leaves.
        self._learn_endpoints()
        return plan_from_message(self._answer(ask).plan)

    def _answer(self, ask: Callable[[resize_pb2_grpc.ResizeServiceStub], AnswerT]) -> AnswerT:
        """Return the answer of the first endpoint that gives one."""
        endpoint, answer = self._ask_in_turn(
            lambda channel: ask(resize_pb2_grpc.ResizeServiceStub(channel))
        )
        # This one first, the next time.
        self._endpoints.remove(endpoint)
        self._endpoints.insert(0, endpoint)
        return answer

    def _learn_endpoints(self) -> None:
        """Add the cluster's nodes to the given endpoints."""
        for endpoint in self._given:
            stub = cluster_pb2_grpc.ClusterServiceStub(self.channel(endpoint))
            try:
                with rpc.mapped_errors(endpoint):
                    answer = stub.GetCluster(
                        cluster_pb2.GetClusterRequest(), timeout=self.timeout_s
                    )
            except BackstayError as error:
                if not error.retry_safe:
                    raise
                continue
            known = [node.control_address for node in answer.nodes]
            self._endpoints = list(dict.fromkeys([*self._endpoints, *known]))
            return


def _ended(plan: ResizePlan) -> str:
    return f"was {plan.reason}" if plan.state == "cancelled" else f"has failed: {plan.reason}"


def resize(
    endpoint: str,
    nodes: int,
    *,
    stop: bool = True,
    pause: bool = False,
    timeout_s: float | None = None,
    progress: ProgressOfPlan | None = None,
    config: ClientConfig | None = None,
) -> ResizePlan:
    """Have a cluster's rows on so many nodes, and wait until they are.

    Args:
        endpoint: ``"host:port,host:port"``: control addresses of nodes to try in turn.
        nodes: How many nodes; a launcher or an operator must start missing ones.
        stop: Whether leaving processes end when they are empty.
        pause: Whether trainers are to wait while copies move.
        timeout_s: How long to wait at most; None: without end.
        progress: Called with the plan each time that it has changed.
        config: Deadlines, token and certificates; by default as a client's.

    Returns:
        The plan that is done.

    Raises:
        ResizeRefused: It cannot be done, or was not; the message says why.
        DeadlineExceeded: It is not done in time, and goes on.
        ServerUnavailable: No node answers.
    """
    with ClusterResizing(endpoint, config) as resizing:
        plan = resizing.resize(nodes, stop=stop, pause=pause)
        return resizing.wait(plan, timeout_s=timeout_s, progress=progress)
