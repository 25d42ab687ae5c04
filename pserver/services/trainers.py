"""``TrainersService``: trainers say that they are alive, and any caller may ask who they are."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from grpc import aio

from backstay._proto.v1 import trainers_pb2, trainers_pb2_grpc
from backstay.consensus.records.trainers import TrainerRecord
from backstay.pserver.membership.departures import now_s
from backstay.pserver.membership.trainer_registrations import TrainerRegistrations

__all__ = ["TrainersService"]

FAMILIES = ("ipv4:", "ipv6:")


class TrainersService(trainers_pb2_grpc.TrainersServiceServicer):
    """Answers through ``TrainerRegistrations``."""

    def __init__(self, node_id: str, registrations: TrainerRegistrations) -> None:
        """Prepare."""
        self._node_id = node_id
        self._registrations = registrations

    async def RegisterTrainer(  # noqa: N802 (the name is the service's)
        self,
        request: trainers_pb2.RegisterTrainerRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> trainers_pb2.RegisterTrainerResponse:
        """Note that a trainer is alive."""
        told = request.trainer
        last_push = 0.0
        if request.HasField("last_push_age_ms"):
            last_push = max(0.0, round(now_s() - request.last_push_age_ms / 1000, 0))
        ttl_ms = self._registrations.register(
            TrainerRecord(
                trainer_id=told.id,
                host=told.host,
                address=_address_of(context.peer()),
                pid=told.pid,
                job=told.job,
                worker=told.worker,
                start_time=told.start_time,
                last_push=last_push,
                pushes=told.pushes,
                node=self._node_id,
            )
        )
        return trainers_pb2.RegisterTrainerResponse(ttl_ms=ttl_ms)

    async def DeregisterTrainer(  # noqa: N802
        self,
        request: trainers_pb2.DeregisterTrainerRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> trainers_pb2.DeregisterTrainerResponse:
        """Note that a trainer ends."""
        self._registrations.deregister(request.id)
        return trainers_pb2.DeregisterTrainerResponse()

    async def ListTrainers(  # noqa: N802
        self,
        request: trainers_pb2.ListTrainersRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> trainers_pb2.ListTrainersResponse:
        """Return the trainers of the cluster."""
        time_s = now_s()
        records = await self._registrations.all()
        return trainers_pb2.ListTrainersResponse(trainers=[_listed(one, time_s) for one in records])


def _listed(record: TrainerRecord, time_s: float) -> trainers_pb2.ListedTrainer:
    listed = trainers_pb2.ListedTrainer(
        trainer=trainers_pb2.Trainer(
            id=record.trainer_id,
            host=record.host,
            pid=record.pid,
            job=record.job,
            worker=record.worker,
            start_time=record.start_time,
            pushes=record.pushes,
        ),
        address=record.address,
        node_id=record.node,
        up_s=max(0.0, time_s - record.start_time),
    )
    if record.last_push:
        listed.last_push_age_s = max(0.0, time_s - record.last_push)
    return listed


def _address_of(peer: str) -> str:
    """Return gRPC's name of a peer as ``host:port``."""
    text = unquote(peer)
    return next((text[len(one) :] for one in FAMILIES if text.startswith(one)), text)
