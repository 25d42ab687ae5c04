"""The sections ``kubernetes`` and ``schedule`` of a job file: what they take and refuse."""

from __future__ import annotations

from typing import Any

import pytest

from backstay.errors import ConfigError
from backstay.job_spec import JobSpec
from backstay.kubernetes.spec import MoreMemorySpec, amount, high_share


def job(**kubernetes: Any) -> JobSpec:
    return JobSpec.from_mapping(
        {
            "name": "census",
            "model": "model.py",
            "training": "/data/a.csv",
            "kubernetes": {"image": "registry/backstay:1", **kubernetes},
        }
    )


def test_a_job_without_the_section_has_none() -> None:
    spec = JobSpec.from_mapping({"name": "a", "model": "m.py", "training": "a.csv"})
    assert spec.kubernetes is None


def test_the_section_survives_the_jobs_record() -> None:
    spec = job(
        worker={
            "requests": {"cpu": 1, "memory": "4Gi"},
            "priority_class": 0.3,
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "volumes": [{"claim_name": "data", "mount_path": "/data", "read_only": True}],
            "pod_template": {"spec": {"hostNetwork": True}},
        }
    )
    assert JobSpec.from_json(spec.to_json()) == spec
    assert spec.kubernetes is not None
    assert spec.kubernetes.worker.requests == {"cpu": "1", "memory": "4Gi"}
    assert spec.kubernetes.worker.priority_class == "0.3"


def test_more_memory_is_off_unless_the_job_says_so() -> None:
    spec = job(worker={"limits": {"memory": "4Gi"}})
    assert spec.kubernetes is not None
    assert spec.kubernetes.more_memory is None
    spec = job(worker={"limits": {"memory": "4Gi"}}, more_memory={"max": "16Gi"})
    assert JobSpec.from_json(spec.to_json()) == spec
    assert spec.kubernetes is not None
    assert spec.kubernetes.more_memory == MoreMemorySpec(factor=1.5, max="16Gi")


@pytest.mark.parametrize(
    ("given", "share"),
    [("0.3", 0.3), (".5", 0.5), ("1", 1.0), ("0", 0.0), ("1.5", None), ("high", None), ("", None)],
)
def test_a_share_is_a_number_up_to_one(given: str, share: float | None) -> None:
    assert high_share(given) == share


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"image": ""}, "kubernetes.image: '' is not the name of an image"),
        ({"image": "a b"}, "kubernetes.image: 'a b' is not the name of an image"),
        ({"pull_policy": "Sometimes"}, "kubernetes.pull_policy: 'Sometimes' is not one of Always"),
        ({"namespace": "My_Space"}, "kubernetes.namespace: 'My_Space' is not a name"),
        ({"secrets": ["a/b"]}, "kubernetes.secrets: 'a/b' is not a name"),
        ({"model_folder": "zoo"}, "kubernetes.model_folder: 'zoo' is not an absolute path"),
        ({"worker": {"requests": {"cpu": "two"}}}, "kubernetes.worker.requests.cpu: 'two' is not"),
        ({"more_memory": {"max": "4Gi"}}, "kubernetes.more_memory: needs worker.limits.memory"),
        (
            {"more_memory": {"max": "much"}, "worker": {"limits": {"memory": "4Gi"}}},
            "kubernetes.more_memory.max: 'much' is not a quantity",
        ),
        (
            {"more_memory": {"max": "4096Mi"}, "worker": {"limits": {"memory": "4Gi"}}},
            "kubernetes.more_memory.max: 4096Mi is not more than worker.limits.memory, 4Gi",
        ),
        (
            {"more_memory": {"factor": 1, "max": "8Gi"}, "worker": {"limits": {"memory": "4Gi"}}},
            "kubernetes.more_memory.factor: 1",
        ),
        ({"worker": {"requests": "cpu=1"}}, "kubernetes.worker.requests: 'cpu=1' is not a mapping"),
        ({"master": {"priority_class": 0.5}}, "kubernetes.master.priority_class: '0.5' is a share"),
        ({"worker": {"priority_class": "Very High"}}, "kubernetes.worker.priority_class: 'Very"),
        ({"worker": {"tolerations": [{"kee": "a"}]}}, "kubernetes.worker.tolerations.0.kee: no"),
        ({"worker": {"tolerations": "all"}}, "kubernetes.worker.tolerations: 'all' is not a list"),
        ({"worker": {"tolerations": ["all"]}}, "kubernetes.worker.tolerations.0: 'all' is not a"),
        ({"volumes": [{"mount_path": "/data"}]}, "kubernetes.volumes.0: give one of claim_name"),
        (
            {"volumes": [{"secret": "a", "host_path": "/b", "mount_path": "/c"}]},
            "kubernetes.volumes.0: give one of",
        ),
        (
            {"volumes": [{"secret": "a", "mount_path": "c"}]},
            "kubernetes.volumes.0.mount_path: give an absolute path",
        ),
        (
            {
                "volumes": [{"secret": "a", "mount_path": "/c"}],
                "worker": {"volumes": [{"claim_name": "b", "mount_path": "/c/"}]},
            },
            "kubernetes.worker.volumes: two volumes have the mount_path /c",
        ),
        ({"worker": {"pod_template": {"kind": "Pod"}}}, "kubernetes.worker.pod_template.kind: no"),
        (
            {"worker": {"pod_template": {"metadata": {"labels": None}}}},
            "kubernetes.worker.pod_template.metadata.labels: None has no fields; leave it out",
        ),
        ({"worker": {"pod_template": {"spec": None}}}, "kubernetes.worker.pod_template.spec: None"),
        (
            {"master": {"pod_template": {"spec": {"containers": None}}}},
            "kubernetes.master.pod_template.spec.containers: None is not a list",
        ),
        (
            {"worker": {"pod_template": {"spec": {"initContainers": [{"image": "a"}]}}}},
            "kubernetes.worker.pod_template.spec.initContainers.0.name: is missing",
        ),
        ({"workers": {}}, "kubernetes.workers: no such field; did you mean 'worker'?"),
    ],
)
def test_a_wrong_value_is_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        job(**wrong)
    assert str(refused.value).startswith(words), refused.value


def test_the_image_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"^kubernetes\.image: is missing"):
        JobSpec.from_mapping({"name": "a", "model": "m.py", "training": "a", "kubernetes": {}})


def scheduled(schedule: Any) -> JobSpec:
    return JobSpec.from_mapping(
        {"name": "a", "model": "m.py", "training": "a.csv", "schedule": schedule}
    )


@pytest.mark.parametrize(
    "cron",
    [
        "* * * * *",
        "0 3 * * *",
        "*/10 0-6,22-23 1,15 jan-MAR mon-fri",
        "5/15 ? * * SUN",
        "@daily",
    ],
)
def test_a_cron_expression_is_a_schedule(cron: str) -> None:
    spec = scheduled(cron).schedule
    assert spec is not None
    assert (spec.cron, spec.time_zone) == (cron, "Etc/UTC")
    assert JobSpec.from_json(scheduled(cron).to_json()).schedule == spec


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("0 3 * *", "schedule.cron: '0 3 * *' does not have five fields (minute, hour, day of"),
        ("@never", "schedule.cron: '@never' does not have five fields"),
        ("60 3 * * *", "schedule.cron: '60' is not a minute: 0 to 59"),
        ("0 3 0 * *", "schedule.cron: '0' is not a day of the month: 1 to 31"),
        ("0 3 * foo *", "schedule.cron: 'foo' is not a month: 1 to 12"),
        ("0 3 * * 7", "schedule.cron: '7' is not a day of the week: 0 to 6"),
        ("0 5-3 * * *", "schedule.cron: '5-3' is not a hour: 0 to 23"),
        ("*/0 3 * * *", "schedule.cron: '*/0' is not a minute"),
        ("0, 3 * * *", "schedule.cron: '' is not a minute"),
        ({"time_zone": "UTC"}, "schedule.cron: is missing"),
        ({"cron": "@daily", "time_zone": ""}, "schedule.time_zone: '' is not the name of a time"),
        ({"cron": "@daily", "service_account": "A b"}, "schedule.service_account: 'A b' is not"),
    ],
)
def test_what_is_no_schedule_is_refused_by_name(wrong: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        scheduled(wrong)
    assert str(refused.value).startswith(words), refused.value


@pytest.mark.parametrize(
    ("quantity", "number"),
    [
        ("500m", 0.5),
        ("2", 2),
        ("1.5", 1.5),
        ("2G", 2e9),
        ("1Ki", 1024),
        ("1e3", 1000),
        ("3E", 3e18),
    ],
)
def test_a_quantity_stands_for_a_number(quantity: str, number: float) -> None:
    assert amount(quantity) == pytest.approx(number)
