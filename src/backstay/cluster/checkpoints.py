"""Checkpoints as a trainer or a job master asks for them.

Imports :mod:`backstay.checkpoint.remote`; rows never pass here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backstay.checkpoint import remote
from backstay.checkpoint.remote import CheckpointInfo, SaveKind
from backstay.checkpoint.restore_state import RestoreState
from backstay.cluster.directory import Directory
from backstay.errors import CheckpointNotFound

__all__ = ["CheckpointInfo", "Checkpoints", "RestoreState", "Restored"]


@dataclass(frozen=True)
class Restored:
    """What the cluster was restored from.

    Attributes:
        checkpoint: The checkpoint.
        progress: The trainers' progress that was saved with it.
        version: Tells this restore from every other one, also of the same checkpoint.
    """

    checkpoint: CheckpointInfo
    progress: Mapping[str, Any]
    version: int = 0


class Checkpoints:
    """The checkpoints of a client's cluster; see :attr:`backstay.trainer.Client.checkpoints`."""

    def __init__(self, directory: Directory) -> None:
        """Prepare; nothing is asked yet."""
        self._directory = directory

    def save(
        self,
        *,
        kind: SaveKind = "auto",
        tags: Mapping[str, str | int | float] | None = None,
        progress: Mapping[str, Any] | None = None,
    ) -> CheckpointInfo:
        """Have a checkpoint written, and wait until it is whole; pushes go on meanwhile.

        It has every push that was acknowledged before this call.

        Args:
            kind: ``auto`` (full every so often, as the cluster's settings say), ``full`` or
                ``incremental``.
            tags: Notes, such as ``{"pass": 3}``.
            progress: What has been trained on so far, as JSON can keep it; it comes back with
                :meth:`restored`. Give what holds now, before the call: a push that comes later may
                be in the checkpoint, but is skipped when it is sent again.

        Raises:
            CheckpointRefused: No folder is set, one is being restored, or others are written for
                longer than a minute.
            CheckpointUnavailable: The folder, or some slots, cannot be reached.
        """
        return self._directory.call_to_its_end(
            lambda channel: remote.save(channel, kind=kind, tags=tags, progress=progress)
        )

    def list(self) -> tuple[CheckpointInfo, ...]:
        """Return the whole checkpoints, oldest first."""
        found = self._directory.call(
            lambda channel, timeout_s: remote.list_checkpoints(channel, timeout_s=timeout_s)
        )
        return found.checkpoints

    def restored(self) -> Restored | None:
        """Return what the cluster was restored from last; None if from nothing.

        Raises:
            CheckpointNotFound: It was, but the checkpoint is gone since, and the progress with it.
        """
        state = self.restore_state()
        if not state.id:
            return None
        try:
            info, _, progress = self._directory.call(
                lambda channel, timeout_s: remote.show(
                    channel, state.id, url=state.url, timeout_s=timeout_s
                )
            )
        except CheckpointNotFound as error:
            raise CheckpointNotFound(
                f"the cluster was restored from {state.id}, which is gone: {error}"
            ) from error
        return Restored(info, progress, state.version)

    def restore_state(self) -> RestoreState:
        """Return how the last restore goes; its ``version`` tells it from every other one."""
        return self._directory.call(
            lambda channel, timeout_s: remote.restore_state(channel, timeout_s=timeout_s)
        )
