"""How much memory a worker's Pod may use, and how much the next one gets.

Values in, values out: a Pod is a mapping as the API gives it. Imports ``backstay.errors``,
``backstay.kubernetes.spec`` and ``names``; does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from backstay.errors import ConfigError
from backstay.kubernetes.names import WORKER
from backstay.kubernetes.spec import MoreMemorySpec, amount

__all__ = ["MoreMemory", "memory_limit", "memory_quantity", "quantity_bytes", "with_memory"]

MIB = 1024 * 1024


class MoreMemory(NamedTuple):
    """What workers get that begin after one has run out of memory.

    Attributes:
        factor: So many times its limit.
        most: Bytes at most.
    """

    factor: float
    most: int

    @classmethod
    def of(cls, spec: MoreMemorySpec | None) -> MoreMemory | None:
        """Return what a job file says; None: they get as much as before."""
        return None if spec is None else cls(spec.factor, math.floor(amount(spec.max)))

    def after(self, limit: int) -> int:
        """Return the limit of the next worker, in bytes; whole MiB, unless it is the most."""
        return min(self.most, math.ceil(limit * self.factor / MIB) * MIB)


def memory_limit(pod: Mapping[str, Any]) -> int:
    """Return how many bytes a worker's container may use; 0: it has no limit."""
    containers = pod.get("spec", {}).get("containers") or ()
    own: Mapping[str, Any] = next((one for one in containers if one.get("name") == WORKER), {})
    return _bytes_of(own.get("resources", {}).get("limits"))


def memory_quantity(size: int) -> str:
    """Return bytes as Kubernetes and people write them."""
    return f"{size // MIB}Mi" if size % MIB == 0 else str(size)


def with_memory(pod: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return a Pod whose worker's container may use so much, and asks for more in proportion.

    Args:
        pod: The Pod; it does not change.
        limit: Bytes; no more than it has changes nothing.
    """
    before = memory_limit(pod)
    if not before or limit <= before:
        return dict(pod)
    containers = [
        _grown(one, limit, limit / before) if one.get("name") == WORKER else one
        for one in pod["spec"]["containers"]
    ]
    return {**pod, "spec": {**pod["spec"], "containers": containers}}


def _grown(container: Mapping[str, Any], limit: int, factor: float) -> dict[str, Any]:
    resources = container["resources"]
    limits = {**resources["limits"], "memory": memory_quantity(limit)}
    requests = dict(resources.get("requests") or {})
    asked = _bytes_of(requests)
    if asked:
        requests["memory"] = memory_quantity(min(limit, math.ceil(asked * factor / MIB) * MIB))
    return {**container, "resources": {**resources, "limits": limits, "requests": requests}}


def _bytes_of(amounts: Mapping[str, Any] | None) -> int:
    """Return the memory of limits or requests; 0: they name none, or none that is understood."""
    return quantity_bytes(str((amounts or {}).get("memory", "0")))


def quantity_bytes(quantity: str) -> int:
    """Return the bytes of an amount of memory as Kubernetes writes it; 0: it is not understood."""
    try:
        return math.floor(amount(quantity))
    except ConfigError:
        # A template may have what only Kubernetes understands.
        return 0
