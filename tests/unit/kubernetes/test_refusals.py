"""What a refusal of the API of Kubernetes means."""

from __future__ import annotations

import pytest

from backstay.errors import KubernetesError
from backstay.kubernetes.refusals import (
    Refusal,
    memory_allowed,
    refusal_of,
    why_refused,
)

ACCOUNT = "system:serviceaccount:team:backstay-job-master"
RIGHT = (
    f'Kubernetes: pods is forbidden: User "{ACCOUNT}" cannot create resource "pods" in API group '
    '"" in the namespace "team"'
)
SCALE = (
    f'Kubernetes: statefulsets.apps "a" is forbidden: User "{ACCOUNT}" cannot patch resource '
    '"statefulsets/scale" in API group "apps" in the namespace "team"'
)
POD = 'Kubernetes: pods "backstay-a-w-0" is forbidden'


@pytest.mark.parametrize(
    ("status", "words", "refusal"),
    [
        (403, RIGHT, Refusal.FORBIDDEN),
        (403, f'{POD}: violates PodSecurity "restricted:latest"', Refusal.FORBIDDEN),
        (403, f"{POD}: no PriorityClass with name high was found", Refusal.FORBIDDEN),
        (403, f"{POD}: failed quota: pods: must specify limits.cpu", Refusal.FORBIDDEN),
        (401, "Kubernetes: Unauthorized", Refusal.FORBIDDEN),
        (403, f"{POD}: exceeded quota: pods, requested: pods=1, used: pods=3", Refusal.PASSES),
        (403, f"{POD}: status unknown for quota: pods, resources: pods", Refusal.PASSES),
        (0, "Kubernetes does not answer", Refusal.PASSES),
        (409, "Kubernetes: the object has been modified", Refusal.PASSES),
        (429, "Kubernetes: Too Many Requests", Refusal.PASSES),
        (503, "Kubernetes: apiserver is shutting down", Refusal.PASSES),
        (422, "Kubernetes: spec.containers[0].image: Required value", Refusal.WRONG),
        (400, "Kubernetes: Bad Request", Refusal.WRONG),
    ],
)
def test_a_refusal_that_passes_is_told_from_one_that_does_not(
    status: int, words: str, refusal: Refusal
) -> None:
    error = KubernetesError(words, status=status)
    assert refusal_of(error) is refusal
    assert why_refused(error).startswith(words)


def test_a_right_that_is_missing_is_told_with_who_needs_it_and_where_it_is() -> None:
    where = "give it the Role of deploy/kubernetes/job-master/job-master.yaml"
    assert why_refused(KubernetesError(RIGHT, status=403)) == (
        f"{RIGHT}. The ServiceAccount backstay-job-master lacks the right to create pods: {where}"
    )
    assert why_refused(KubernetesError(SCALE, status=403)) == (
        f"{SCALE}. The ServiceAccount backstay-job-master lacks the right to patch "
        f"statefulsets/scale of the API group apps: {where}"
    )


@pytest.mark.parametrize(
    ("status", "words", "allowed"),
    [
        (403, f"{POD}: maximum memory usage per Container is 1Gi, but limit is 2Gi", "1Gi"),
        (
            403,
            f"{POD}: [maximum cpu usage per Container is 1, but limit is 2, maximum memory usage "
            "per Container is 1536Mi, but limit is 2Gi]",
            "1536Mi",
        ),
        # Its containers have a part each.
        (403, f"{POD}: maximum memory usage per Pod is 1Gi, but limit is 2147483648", ""),
        (
            403,
            f"{POD}: memory max limit to request ratio per Container is 1, but provided ratio is "
            "2.000000",
            "",
        ),
        (403, f"{POD}: maximum cpu usage per Container is 1, but limit is 2", None),
        (403, f"{POD}: exceeded quota: a, requested: limits.memory=2Gi, used: 0", None),
        (403, RIGHT, None),
        (500, "maximum memory usage per Container is 1Gi", None),
    ],
)
def test_too_much_memory_is_told_from_other_refusals_with_what_is_allowed(
    status: int, words: str, allowed: str | None
) -> None:
    assert memory_allowed(KubernetesError(words, status=status)) == allowed
