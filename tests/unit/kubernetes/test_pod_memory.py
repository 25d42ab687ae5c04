"""How much memory a worker's Pod may use, and how much the next one gets."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from backstay.kubernetes.pod_memory import MIB, MoreMemory, memory_limit, with_memory
from backstay.kubernetes.spec import MoreMemorySpec

GIB = 1024 * MIB


def pod(**resources: Any) -> dict[str, Any]:
    containers = [
        {"name": "proxy", "resources": {"limits": {"memory": "1Ti"}}},
        {"name": "worker", "resources": resources},
    ]
    return {"spec": {"containers": containers}}


def test_the_limit_is_that_of_the_workers_container() -> None:
    assert memory_limit(pod(limits={"memory": "1536Mi"})) == 1536 * MIB
    assert memory_limit(pod(limits={"memory": "1.5Gi"})) == 1536 * MIB
    assert memory_limit(pod(limits={"memory": 1000})) == 1000
    for none in (pod(), pod(limits={"cpu": "1"}), pod(limits={"memory": "much"}), {}):
        assert memory_limit(none) == 0


def test_the_request_grows_with_the_limit_and_the_rest_stays() -> None:
    before = pod(limits={"memory": "6Gi", "cpu": "2"}, requests={"memory": "4Gi", "cpu": "1"})
    after = with_memory(before, 9 * GIB)
    assert after == pod(
        limits={"memory": "9216Mi", "cpu": "2"}, requests={"memory": "6144Mi", "cpu": "1"}
    )
    assert memory_limit(before) == 6 * GIB
    # Without one, Kubernetes takes the limit for it.
    assert with_memory(pod(limits={"memory": "1Gi"}), 2 * GIB) == pod(
        limits={"memory": "2048Mi"}, requests={}
    )


def test_less_than_the_job_says_changes_nothing() -> None:
    before = pod(limits={"memory": "6Gi"}, requests={"memory": "4Gi"})
    assert with_memory(before, 0) == with_memory(before, 6 * GIB) == before
    assert with_memory(pod(), GIB) == pod()


@given(
    st.integers(1, 2**42),
    st.floats(1.01, 10.0),
    st.integers(1, 2**44),
    st.integers(1, 60),
)
def test_memory_grows_up_to_the_most_and_no_further(
    begin: int, factor: float, more: int, tries: int
) -> None:
    growth = MoreMemory(factor, begin + more)
    limit = begin
    for _ in range(tries):
        after = growth.after(limit)
        assert limit <= after <= growth.most
        assert after > limit or limit == growth.most
        assert after == growth.most or after >= limit * factor
        limit = after


def test_a_job_file_says_how_much() -> None:
    assert MoreMemory.of(None) is None
    assert MoreMemory.of(MoreMemorySpec(factor=2.0, max="16Gi")) == MoreMemory(2.0, 16 * GIB)
