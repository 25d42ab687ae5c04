"""Profiles: settings that belong together, by how long a job runs.

A profile decides only what is not set: by an argument, in a file or in the environment. Pure;
imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PROFILES", "Profile"]

# With this many nodes three copies of each slot fit on distinct nodes after a loss.
NODES_FOR_THREE_COPIES = 4
CHECKPOINT_EVERY_S = 600


@dataclass(frozen=True)
class Profile:
    """What a profile decides.

    Attributes:
        name: ``test``, ``short`` or ``long``.
        replicas: Copies of each slot, the master's own included.
        has_checkpoints: Whether checkpoints are written, and a new cluster begins with the newest.
    """

    name: str
    replicas: int
    has_checkpoints: bool

    def replicas_with(self, nodes: int) -> int:
        """Return the copies of each slot in a cluster that begins with so many nodes."""
        if self.replicas > 1 and nodes >= NODES_FOR_THREE_COPIES:
            return self.replicas + 1
        return self.replicas

    def server_settings(self, nodes: int) -> dict[str, object]:
        """Return settings of ``pserver serve``, for a cluster that begins with so many nodes."""
        return {
            "replicas": self.replicas_with(nodes),
            "checkpoint_every_s": CHECKPOINT_EVERY_S if self.has_checkpoints else 0,
            "restore": "latest" if self.has_checkpoints else "no",
        }

    def job_settings(self, servers: int) -> dict[tuple[str, str], object]:
        """Return fields of a job file, for a job that has so many servers of its own."""
        return {
            ("servers", "replicas"): self.replicas_with(servers),
            ("checkpoint", "every"): "pass" if self.has_checkpoints else "none",
        }


PROFILES: Mapping[str, Profile] = {
    "test": Profile("test", replicas=1, has_checkpoints=False),
    "short": Profile("short", replicas=1, has_checkpoints=True),
    "long": Profile("long", replicas=2, has_checkpoints=True),
}
