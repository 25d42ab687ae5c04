"""What a job master changes of its job's objects, and what it leaves alone."""

from __future__ import annotations

from typing import cast

import pytest

from backstay.errors import KubernetesError
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.names import object_name, pserver_name
from backstay.kubernetes.owned_job import OwnedJob
from tests.unit.kubernetes.kubernetes_objects import Objects

JOB = "census"
NAME = object_name(JOB)
SERVERS = pserver_name(JOB)


@pytest.fixture
def objects() -> Objects:
    found = Objects(JOB)
    found.make_job("a")
    return found


def owned(objects: Objects) -> OwnedJob:
    return OwnedJob.find(cast(KubernetesApi, objects), JOB)


def test_a_write_that_was_delayed_does_not_replace_the_end(objects: Objects) -> None:
    old, new = owned(objects), owned(objects)
    assert old.publish({"workers": "{}"})
    # The old one's next write is on its way while the end is written.
    objects.before_patch = lambda: assert_written(new.publish({"over": "done"}))
    assert not old.publish({"workers": "later"})
    assert objects.data() == {"workers": "{}", "over": "done"}


def test_the_end_is_written_whatever_came_between(objects: Objects) -> None:
    one, other = owned(objects), owned(objects)
    assert one.publish({"workers": "1"})
    assert other.publish({"workers": "2"})
    assert one.publish({"over": "stopped"})
    assert one.read().over == "stopped"
    assert not other.publish({"workers": "3"})


def test_a_write_without_an_answer_is_made_again(objects: Objects) -> None:
    job = owned(objects)

    def fail() -> None:
        raise KubernetesError("no answer")

    objects.before_patch = fail
    with pytest.raises(KubernetesError, match="no answer"):
        job.publish({"over": "done"})
    assert job.publish({"over": "done"})


def test_a_job_made_anew_is_left_alone(objects: Objects) -> None:
    job = owned(objects)
    assert job.publish({"workers": "{}"})
    objects.make_job("b")
    for call in (lambda: job.publish({"over": "done"}), job.read):
        with pytest.raises(KubernetesError, match="is gone: the job was deleted"):
            call()
    job.end_servers()
    job.scale_to_zero()
    assert objects.data() == {}
    assert objects.replicas("deployments", NAME) == 1
    assert objects.replicas("statefulsets", SERVERS) == 2


def test_servers_that_come_while_the_old_ones_are_ended_stay(objects: Objects) -> None:
    objects.before_patch = lambda: objects.make_job("b")
    owned(objects).end_servers()
    assert objects.replicas("statefulsets", SERVERS) == 2


def test_a_job_that_is_over_has_no_servers_and_no_job_master(objects: Objects) -> None:
    job = owned(objects)
    job.end_servers()
    job.scale_to_zero()
    assert objects.replicas("deployments", NAME) == 0
    assert objects.replicas("statefulsets", SERVERS) == 0
    del objects.found["statefulsets", SERVERS]
    job.end_servers()


def test_a_conflict_with_the_jobs_own_deployment_is_no_success(objects: Objects) -> None:
    def fail() -> None:
        raise KubernetesError("try again", status=409)

    objects.before_patch = fail
    with pytest.raises(KubernetesError, match="try again"):
        owned(objects).scale_to_zero()


def test_workers_that_have_not_ended_are_deleted(objects: Objects) -> None:
    for name, phase in {"w-0": "Running", "w-1": "Failed", "w-2": "Pending"}.items():
        objects.make("pods", name, name, "a", status={"phase": phase})
        objects.found["pods", name]["metadata"]["name"] = name
    objects.found["pods", "w-2"]["metadata"]["deletionTimestamp"] = "2026-11-23T00:00:00Z"
    owned(objects).delete_workers()
    assert objects.deleted == ["w-0"]


def assert_written(is_written: bool) -> None:
    assert is_written
