"""Asking a running cluster for its checkpoints: what trainers and commands share.

Each function makes one call on a channel to any node; the caller opens the channel and turns
failures into errors of ``backstay.errors`` (``rpc.mapped_errors``), which the functions name under
"Raises". Imports the generated messages; it touches no file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import grpc

from backstay._proto.v1 import checkpoint_pb2, checkpoint_pb2_grpc
from backstay.checkpoint.restore_state import RestoreState
from backstay.errors import CheckpointUnavailable, InvalidRequest

__all__ = [
    "CheckpointInfo",
    "CheckpointList",
    "SaveKind",
    "delete",
    "list_checkpoints",
    "restore",
    "restore_state",
    "save",
    "show",
    "verify",
]

SaveKind = Literal["auto", "full", "incremental"]
_KINDS: Mapping[str, checkpoint_pb2.CheckpointKind.ValueType] = {
    "auto": checkpoint_pb2.CHECKPOINT_KIND_UNSPECIFIED,
    "full": checkpoint_pb2.CHECKPOINT_KIND_FULL,
    "incremental": checkpoint_pb2.CHECKPOINT_KIND_INCREMENTAL,
}


@dataclass(frozen=True)
class CheckpointInfo:
    """A whole checkpoint.

    Attributes:
        id: Its id.
        kind: ``full``, or ``incremental``: it adds to ``base``.
        base: Empty if it is full.
        created: When it was begun, ISO 8601.
        cluster: Whose it is.
        slot_count: Slots of that cluster.
        rows: In its own files.
        bytes: Of its own files.
        files: How many these are.
        tables: Names of the tables.
        tags: What the caller noted.
        url: The folder that it was just written to; empty if it was only looked up. Two infos of
            one checkpoint are equal either way.
    """

    id: str
    kind: str
    base: str
    created: str
    cluster: str
    slot_count: int
    rows: int
    bytes: int
    files: int
    tables: tuple[str, ...]
    tags: Mapping[str, Any]
    url: str = field(default="", compare=False)


@dataclass(frozen=True)
class CheckpointList:
    """What is in a folder: checkpoints, oldest first; what was never finished; what is damaged."""

    url: str
    checkpoints: tuple[CheckpointInfo, ...]
    unfinished: tuple[str, ...]
    damaged: tuple[str, ...]


def save(
    channel: grpc.Channel,
    *,
    kind: SaveKind = "auto",
    tags: Mapping[str, str | int | float] | None = None,
    progress: Mapping[str, Any] | None = None,
    tell: Callable[[int, int, int], None] | None = None,
    timeout_s: float | None = None,
) -> CheckpointInfo:
    """Have a checkpoint written and wait for it.

    Args:
        channel: To a node.
        kind: ``auto``: full every so often, as the cluster's settings say.
        tags: Notes; strings and numbers.
        progress: The trainers' progress, kept with it.
        tell: Called with slots written, slots in all, and bytes, as it goes.
        timeout_s: How long it may take; None: as long as it goes on.

    Raises:
        CheckpointRefused: No folder is set, or another checkpoint is being written.
        CheckpointUnavailable: The folder or slots cannot be reached; nothing counts as written.
    """
    if kind not in _KINDS:
        raise InvalidRequest(f"kind: {kind!r} is not one of {', '.join(_KINDS)}")
    request = checkpoint_pb2.SaveRequest(
        kind=_KINDS[kind],
        tags_json=json.dumps(dict(tags or {})),
        progress_json=json.dumps(dict(progress or {})),
    )
    for answer in _stub(channel).Save(request, timeout=timeout_s):
        if tell is not None:
            tell(answer.slots_done, answer.slots_total, answer.bytes)
        if answer.HasField("saved"):
            return replace(_info(answer.saved), url=answer.url)
    raise CheckpointUnavailable("the answer ended before the checkpoint was whole")


def list_checkpoints(channel: grpc.Channel, *, url: str = "", timeout_s: float) -> CheckpointList:
    """Return what is in a folder; empty: the cluster's."""
    request = checkpoint_pb2.ListCheckpointsRequest(url=url)
    answer = _stub(channel).List(request, timeout=timeout_s)
    return CheckpointList(
        url=answer.url,
        checkpoints=tuple(_info(one) for one in answer.checkpoints),
        unfinished=tuple(answer.unfinished),
        damaged=tuple(answer.damaged),
    )


def show(
    channel: grpc.Channel, checkpoint_id: str, *, url: str = "", timeout_s: float
) -> tuple[CheckpointInfo, tuple[str, ...], Mapping[str, Any]]:
    """Return a checkpoint, the ids of its chain from the full one on, and the progress kept in it.

    Raises:
        CheckpointNotFound: There is none of that id; or none at all, if it is empty.
        CheckpointDamaged: Its manifest, or one that it needs, is damaged.
    """
    request = checkpoint_pb2.ShowCheckpointRequest(id=checkpoint_id, url=url)
    answer = _stub(channel).Show(request, timeout=timeout_s)
    return _info(answer.checkpoint), tuple(answer.chain), json.loads(answer.progress_json)


def verify(
    channel: grpc.Channel,
    checkpoint_id: str,
    *,
    url: str = "",
    tell: Callable[[int, int], None] | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Have every file of a checkpoint read; return its id and what is wrong with it."""
    request = checkpoint_pb2.VerifyCheckpointRequest(id=checkpoint_id, url=url)
    for answer in _stub(channel).Verify(request):
        if tell is not None:
            tell(answer.bytes_done, answer.bytes_total)
        if answer.done:
            return answer.id, tuple(answer.problems)
    raise CheckpointUnavailable("the answer ended before the checkpoint was read")


def delete(channel: grpc.Channel, checkpoint_id: str, *, url: str = "", timeout_s: float) -> None:
    """Remove a checkpoint.

    Raises:
        CheckpointNotFound: There is none of that id.
        CheckpointRefused: Another one adds to it.
    """
    request = checkpoint_pb2.DeleteCheckpointRequest(id=checkpoint_id, url=url)
    _stub(channel).Delete(request, timeout=timeout_s)


def restore(
    channel: grpc.Channel,
    checkpoint_id: str = "",
    *,
    url: str = "",
    slots: Sequence[int] = (),
    fallback: bool = False,
    allow_inexact: bool = False,
    timeout_s: float | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Let slots take their content from a checkpoint; what they hold is void from then on.

    Args:
        channel: To a node.
        checkpoint_id: Empty: the newest.
        url: Its folder; empty: the cluster's.
        slots: Only these; none: all.
        fallback: If it is damaged, take the newest one before it that is not.
        allow_inexact: Restore some slots although a job goes on: its records may then count never
            or twice.
        timeout_s: How long the look at its files may take; None: as long as it takes.

    Returns:
        Its id, and why newer ones were passed over. It is loaded after this returns:
        ``restore_state`` tells.

    Raises:
        CheckpointDamaged: It is damaged; the message names the file. Nothing was changed.
        CheckpointRefused: It has another number of slots, another one is being restored, or only
            some slots are wanted while there is a job that is not done.
    """
    request = checkpoint_pb2.RestoreRequest(
        id=checkpoint_id, url=url, slots=slots, fallback=fallback, allow_inexact=allow_inexact
    )
    answer = _stub(channel).Restore(request, timeout=timeout_s)
    return answer.id, tuple(answer.passed_over)


def restore_state(channel: grpc.Channel, *, timeout_s: float) -> RestoreState:
    """Return how the last restore goes."""
    answer = _stub(channel).GetRestore(checkpoint_pb2.GetRestoreRequest(), timeout=timeout_s)
    return RestoreState(
        id=answer.id,
        url=answer.url,
        state=answer.state,
        slots_left=answer.slots_left,
        trouble=answer.trouble,
        version=answer.version,
        generation=answer.generation,
        done_generation=answer.done_generation,
        slots=answer.slots,
        created=answer.created,
        lost=answer.lost_slots,
    )


def _stub(channel: grpc.Channel) -> checkpoint_pb2_grpc.CheckpointServiceStub:
    return checkpoint_pb2_grpc.CheckpointServiceStub(channel)


def _info(message: checkpoint_pb2.Checkpoint) -> CheckpointInfo:
    names = {number: name for name, number in _KINDS.items()}
    return CheckpointInfo(
        id=message.id,
        kind=names[message.kind],
        base=message.base,
        created=message.created,
        cluster=message.cluster,
        slot_count=message.slot_count,
        rows=message.rows,
        bytes=message.bytes,
        files=message.files,
        tables=tuple(message.tables),
        tags=json.loads(message.tags_json or "{}"),
    )
