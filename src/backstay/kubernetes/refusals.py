"""What a refusal of the API means: whether it passes by itself, and what is to be mended.

Values in, values out. Imports ``backstay.errors``; does no I/O.
"""

from __future__ import annotations

import enum
import re

from backstay.errors import KubernetesError

__all__ = ["FORBIDDEN_MAX_S", "Refusal", "memory_allowed", "refusal_of", "why_refused"]

# So long somebody may take to give a right that is missing.
FORBIDDEN_MAX_S = 600.0
# Of all that the job master may do, below deploy/.
_ROLE = "deploy/kubernetes/job-master/job-master.yaml"
# What Kubernetes says of a right that the account of the caller does not have.
_RIGHT = re.compile(
    r'User "(?:system:serviceaccount:)?(?P<account>[^"]+)" cannot (?P<verb>\w+) '
    r'resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
)
# What a LimitRange says of a Pod that may use too much, or too much more than it asks for.
_MEMORY = re.compile(
    r"maximum memory usage per (?P<of>Container|Pod) is (?P<most>[^,\s]+)"
    r"|memory max limit to request ratio per (?:Container|Pod) is"
)
_QUOTA = ("exceeded quota", "status unknown for quota")


class Refusal(enum.Enum):
    """What is to be expected of the same call later."""

    # It may succeed by itself: the API is away or busy, or a quota is used up.
    PASSES = enum.auto()
    # Somebody must give a right, or change what the cluster forbids.
    FORBIDDEN = enum.auto()
    # The object itself is wrong.
    WRONG = enum.auto()


def refusal_of(error: KubernetesError) -> Refusal:
    """Return what is to be expected of a call that was refused."""
    if error.status in (400, 422):
        return Refusal.WRONG
    is_quota = any(one in str(error) for one in _QUOTA)
    return Refusal.FORBIDDEN if error.status in (401, 403) and not is_quota else Refusal.PASSES


def memory_allowed(error: KubernetesError) -> str | None:
    """Return how much memory a LimitRange allows a container, as it says; empty: it does not say.

    None: the call was refused for another reason.
    """
    found = _MEMORY.search(str(error))
    if found is None or refusal_of(error) is not Refusal.FORBIDDEN:
        return None
    # Of a Pod its containers have a part each.
    return str(found["most"]) if found["of"] == "Container" else ""


def why_refused(error: KubernetesError) -> str:
    """Return what the API says, with what to do if the caller lacks a right."""
    found = _RIGHT.search(str(error))
    if found is None or refusal_of(error) is not Refusal.FORBIDDEN:
        return str(error)
    account, verb, resource, group = found.group("account", "verb", "resource", "group")
    of_group = f" of the API group {group}" if group else ""
    return (
        f"{error}. The ServiceAccount {account.rpartition(':')[2]} lacks the right to {verb} "
        f"{resource}{of_group}: give it the Role of {_ROLE}"
    )
