"""``ResizeService``: changing the nodes of the cluster while it serves."""

from __future__ import annotations

from typing import Any

from grpc import aio

from backstay._proto.v1 import resize_pb2, resize_pb2_grpc
from backstay.consensus.records.messages import plan_to_message, repair_to_message
from backstay.consensus.records.plans import ResizePlan
from backstay.pserver.requests.plans import PlanRequests

__all__ = ["ResizeService"]


class ResizeService(resize_pb2_grpc.ResizeServiceServicer):
    """Hands each request to ``PlanRequests``."""

    def __init__(self, requests: PlanRequests) -> None:
        """Prepare."""
        self._requests = requests

    async def Resize(  # noqa: N802 (the name is the service's)
        self,
        request: resize_pb2.ResizeRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> resize_pb2.PlanResponse:
        """Write the plan of a resize."""
        plan = await self._requests.resize(
            request.nodes, stop=request.stop, pause=request.pause, wait_s=request.wait_s
        )
        return _answer(plan)

    async def Drain(  # noqa: N802
        self,
        request: resize_pb2.DrainRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> resize_pb2.PlanResponse:
        """Write the plan of a drain."""
        plan = await self._requests.drain(request.node_id, stop=request.stop, pause=request.pause)
        return _answer(plan)

    async def Rebalance(  # noqa: N802
        self,
        request: resize_pb2.RebalanceRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> resize_pb2.PlanResponse:
        """Write the plan of a rebalance."""
        return _answer(await self._requests.rebalance(pause=request.pause))

    async def GetPlan(  # noqa: N802
        self,
        request: resize_pb2.GetPlanRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> resize_pb2.PlanResponse:
        """Return the plan that was asked for last."""
        answer = _answer(await self._requests.current())
        answer.repairs.extend(repair_to_message(one) for one in self._requests.repairs())
        return answer

    async def CancelPlan(  # noqa: N802
        self,
        request: resize_pb2.CancelPlanRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> resize_pb2.PlanResponse:
        """End the plan that is under way."""
        return _answer(await self._requests.cancel(request.plan_id))


def _answer(plan: ResizePlan | None) -> resize_pb2.PlanResponse:
    return resize_pb2.PlanResponse(plan=None if plan is None else plan_to_message(plan))
