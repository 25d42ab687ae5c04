"""What a node tells of the cluster's last restore: a value. Imports the standard library only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RestoreState"]


@dataclass(frozen=True)
class RestoreState:
    """How the last restore goes; ``id`` is empty if there never was one.

    ``version`` tells it from every other restore, also one of the same checkpoint, and grows; it
    is 0 while the restore is requested and has changed nothing yet. ``generation`` grows with each
    restore, and whenever slots lost all their copies; ``done_generation`` is what it was when this
    restore was done. ``slots`` is how many slots it is of; 0: all. ``created`` is when the
    checkpoint was begun, if known; ``lost`` is how many slots had lost all their copies,
    which is why, or 0 if an operator asked for it.
    """

    id: str
    url: str
    state: str
    slots_left: int
    trouble: str
    version: int = 0
    generation: int = 0
    done_generation: int = 0
    slots: int = 0
    created: str = ""
    lost: int = 0
