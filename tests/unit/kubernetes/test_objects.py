"""The objects of a job on Kubernetes: what the command and the launcher would make."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest

from backstay.errors import ConfigError
from backstay.exit_codes import JOB_CODES, ExitCode
from backstay.job_spec import JobSpec
from backstay.kubernetes.names import (
    OWNER,
    object_name,
    status_name,
    worker_pod_name,
)
from backstay.kubernetes.objects import (
    FILES_BYTES_MAX,
    LAST_WORDS_VARIABLE,
    RUN_ENDS,
    JobObjects,
    Owner,
    job_objects,
    schedule_objects,
    spec_in_pods,
    worker_pod,
)
from backstay.kubernetes.pod_template import files_of, merged, whole_cores
from backstay.kubernetes.spec import PodSpec, ScheduleSpec

OWNED_BY = Owner("backstay-census", "0f8fad5b-d9cb-469f-a165-70867728950e")
# The oldest release that has all that we use, and the newest that the library knows.
VERSIONS = ("1.27", kubernetes_validate.latest_version())
HOST_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def job(name: str = "census", **kubernetes: Any) -> JobSpec:
    document = {
        "name": name,
        "model": "/home/me/zoo/model.py",
        "training": "/data/a.csv",
        "kubernetes": {"image": "registry/backstay:1", **kubernetes},
    }
    return spec_in_pods(JobSpec.from_mapping(document), ["ps-0:7000", "ps-1:7000"])


def made(spec: JobSpec, files: dict[str, str] | None = None) -> JobObjects:
    return job_objects(spec, {"model.py": "# a model"} if files is None else files)


def pod_of(spec: JobSpec, **more: Any) -> dict[str, Any]:
    given = {
        "command": ["-m", "worker"],
        "env": {"A": "b"},
        "files": "f",
        "priority_class": "",
        **more,
    }
    return worker_pod(spec, "w-3", OWNED_BY, **given)


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    found: dict[str, Any] = container
    return found


@pytest.mark.parametrize("job_name", ["census", "Census", "a_b", "a.b", "x" * 64, "ÄÖ", "a" * 31])
def test_each_job_has_a_host_name_of_its_own(job_name: str) -> None:
    name = worker_pod_name(job_name, OWNED_BY.uid, "w-1000000")
    assert HOST_NAME.fullmatch(name), name


def test_names_that_look_alike_are_told_apart() -> None:
    names = [object_name(one) for one in ("census", "Census", "a_b", "a.b", "a-b", "a--b")]
    assert len(set(names)) == len(names)
    assert names[0] == "backstay-census"


def test_a_job_with_other_files_reads_them_from_an_object_of_another_name() -> None:
    # A node shows new Pods the old content of an immutable ConfigMap that old ones still use.
    one, same, other = (made(job(), {"model.py": text}) for text in ("# a", "# a", "# b"))
    assert one.files["immutable"]
    names = [objects.files["metadata"]["name"] for objects in (one, same, other)]
    assert names[0] == names[1] != names[2]
    for objects, name in zip((one, same, other), names, strict=True):
        assert files_of(objects.deployment["spec"]["template"]) == name
        assert files_of(pod_of(job(), files=name)) == name
    assert not re.fullmatch(r"[a-z0-9-]+", names[0])


def test_the_status_of_a_job_has_a_name_that_no_job_has() -> None:
    assert status_name("census") != object_name("census-status")
    assert not re.fullmatch(r"[a-z0-9-]+", status_name("census"))


def test_the_job_in_the_pods_has_their_paths_and_the_clusters_addresses() -> None:
    spec = job()
    assert spec.model == "/backstay/job/model.py"
    assert spec.servers.endpoints == ("ps-0:7000", "ps-1:7000")
    assert spec.launcher == "kubernetes"
    assert job(model_folder="/app/zoo").model == "/app/zoo/model.py"


def test_the_files_of_a_job_are_in_one_config_map() -> None:
    objects = made(job(), {"model.py": "# a model", "features.py": "# features"})
    data = objects.files["data"]
    assert set(data) == {"job.json", "model.py", "features.py"}
    assert JobSpec.from_json(data["job.json"]) == job()
    assert objects.files["immutable"] is True


def test_two_submissions_are_the_same_job_if_nothing_differs() -> None:
    assert made(job()).content == made(job()).content
    assert made(job()).content != made(job(), {"model.py": "# another"}).content
    assert made(job()).content != made(job(image="registry/backstay:2")).content


def test_files_that_no_config_map_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a ConfigMap holds 1,048,576.*kubernetes\.model_folder"):
        made(job(), {"model.py": "x" * FILES_BYTES_MAX})
    with pytest.raises(ConfigError, match=r"takes no file of the name 'a b\.py'"):
        made(job(), {"model.py": "", "a b.py": ""})


def test_the_job_master_runs_as_one_replica_that_is_replaced() -> None:
    deployment = made(job(master={"priority_class": "urgent"}, insecure=True)).deployment
    spec = deployment["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}
    pod = spec["template"]
    assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["serviceAccountName"] == "backstay-job-master"
    assert pod["spec"]["priorityClassName"] == "urgent"
    container = container_of(pod)
    assert container["command"][-1] == "--insecure"
    variables = {one["name"]: one for one in container["env"]}
    assert variables["BACKSTAY_ENDPOINT"]["value"] == "ps-0:7000,ps-1:7000"
    assert variables["POD_NAMESPACE"]["valueFrom"]["fieldRef"] == {
        "fieldPath": "metadata.namespace"
    }


@pytest.mark.parametrize(
    ("container", "path"),
    [({}, "/dev/termination-log"), ({"terminationMessagePath": "/tmp/words"}, "/tmp/words")],
)
def test_a_worker_knows_where_its_node_looks_for_its_last_words(
    container: dict[str, Any], path: str
) -> None:
    template = {"spec": {"containers": [{"name": "worker", **container}, {"name": "proxy"}]}}
    pod = pod_of(job(worker={"pod_template": template}))
    own, proxy = pod["spec"]["containers"]
    assert {"name": LAST_WORDS_VARIABLE, "value": path} in own["env"]
    assert own.get("terminationMessagePath", path) == path
    assert "env" not in proxy


def test_a_worker_belongs_to_the_deployment_and_may_do_little() -> None:
    pod = pod_of(job(secrets=["token"], pull_secrets=["registry"]))
    assert pod["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": "backstay-census",
            "uid": OWNED_BY.uid,
        }
    ]
    assert pod["metadata"]["labels"][OWNER] == OWNED_BY.uid.replace("-", "")
    # The selector of the job master's Deployment must not find it.
    selector = made(job()).deployment["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= pod["metadata"]["labels"].items()
    spec, container = pod["spec"], container_of(pod)
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["envFrom"] == [{"secretRef": {"name": "token"}}]
    assert {"name": "A", "value": "b"} in container["env"]
    assert {one["mountPath"]: one.get("readOnly", False) for one in container["volumeMounts"]} == {
        "/tmp": False,
        "/backstay/job": True,
    }


def test_what_the_job_file_says_of_workers_is_in_their_pods() -> None:
    pod = pod_of(
        job(
            volumes=[{"claim_name": "data", "mount_path": "/data", "read_only": True}],
            env={"A": "all", "B": "all"},
            worker={
                "image": "registry/worker:1",
                "requests": {"cpu": "1500m"},
                "limits": {"cpu": 2, "memory": "4Gi"},
                "node_selector": {"disk": "ssd"},
                "tolerations": [{"key": "spot", "operator": "Exists"}],
                "volumes": [{"host_path": "/mnt", "mount_path": "/x", "sub_path": "y"}],
                "env": {"B": "worker"},
            },
        ),
        priority_class="low",
    )
    spec, container = pod["spec"], container_of(pod)
    assert container["image"] == "registry/worker:1"
    assert container["resources"] == {
        "requests": {"cpu": "1500m"},
        "limits": {"cpu": "2", "memory": "4Gi"},
    }
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert (values["A"], values["B"], values["OMP_NUM_THREADS"]) == ("all", "worker", "2")
    assert spec["priorityClassName"] == "low"
    assert spec["nodeSelector"] == {"disk": "ssd"}
    assert [one["key"] for one in spec["tolerations"]] == [
        "spot",
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ]
    sources = {one["name"]: one for one in spec["volumes"]}
    assert sources["volume-0"]["persistentVolumeClaim"] == {"claimName": "data"}
    assert sources["volume-1"]["hostPath"] == {"path": "/mnt"}
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    assert mounts["/data"]["readOnly"] is True
    assert mounts["/x"]["subPath"] == "y"


def test_a_template_is_merged_but_cannot_change_what_the_worker_is() -> None:
    template = {
        "metadata": {"labels": {"team": "ads", OWNER: "other"}, "name": "mine"},
        "spec": {
            "hostNetwork": True,
            "restartPolicy": "Always",
            "containers": [
                {"name": "worker", "env": [{"name": "A", "value": "template"}]},
                {"name": "sidecar", "image": "proxy"},
            ],
        },
    }
    pod = pod_of(job(worker={"pod_template": template}))
    assert pod["metadata"]["name"] == worker_pod_name("census", OWNED_BY.uid, "w-3")
    assert pod["metadata"]["labels"]["team"] == "ads"
    assert pod["metadata"]["labels"][OWNER] == OWNED_BY.uid.replace("-", "")
    assert pod["spec"]["hostNetwork"] is True
    assert pod["spec"]["restartPolicy"] == "Never"
    worker, sidecar = pod["spec"]["containers"]
    assert worker["image"] == "registry/backstay:1"
    assert {"name": "A", "value": "template"} in worker["env"]
    assert sidecar == {"name": "sidecar", "image": "proxy"}


def test_init_containers_tell_the_end_of_their_log() -> None:
    first = [{"name": "fetch"}, {"name": "check", "terminationMessagePolicy": "File"}]
    pod = pod_of(job(worker={"pod_template": {"spec": {"initContainers": first}}}))
    policies = [one["terminationMessagePolicy"] for one in pod["spec"]["initContainers"]]
    assert policies == ["FallbackToLogsOnError", "File"]


def test_the_objects_are_plain_values() -> None:
    objects = made(job())
    assert json.loads(json.dumps(objects)) == [*objects]
    assert json.loads(json.dumps(pod_of(job()))) == pod_of(job())


@pytest.mark.parametrize(
    ("below", "above", "result"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}}, {"a": 1, "b": {"c": 2, "d": 3}}),
        ([{"name": "a", "x": 1}], [{"name": "a", "y": 2}], [{"name": "a", "x": 1, "y": 2}]),
        ([{"mountPath": "/a"}], [{"mountPath": "/b"}], [{"mountPath": "/a"}, {"mountPath": "/b"}]),
        (["a"], ["b"], ["b"]),
        ([{"key": "a"}], [], []),
        (1, None, None),
    ],
)
def test_lists_are_merged_by_name(below: Any, above: Any, result: Any) -> None:
    assert merged(below, above) == result


@pytest.mark.parametrize(
    ("pod", "cores"),
    [
        (PodSpec(), None),
        (PodSpec(requests={"cpu": "500m"}), 1),
        (PodSpec(requests={"cpu": "500m"}, limits={"cpu": "2500m"}), 2),
        (PodSpec(limits={"cpu": "4"}), 4),
        (PodSpec(limits={"cpu": "1e1"}), 10),
        (PodSpec(limits={"cpu": "1Ki"}), 1024),
    ],
)
def test_threads_follow_the_cpu_of_a_pod(pod: PodSpec, cores: int | None) -> None:
    assert whole_cores(pod) == cores


def scheduled(**kubernetes: Any) -> JobSpec:
    schedule = ScheduleSpec(cron="0 3 * * *", time_zone="Europe/Berlin", runs_kept=2)
    return replace(job(**kubernetes), schedule=schedule)


def test_a_schedule_makes_one_run_at_a_time() -> None:
    files = {"model.py": "# a model"}
    objects = schedule_objects(scheduled(master={"image": "registry/master:1"}), files)
    spec = objects.cron_job["spec"]
    assert (spec["schedule"], spec["timeZone"]) == ("0 3 * * *", "Europe/Berlin")
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["successfulJobsHistoryLimit"] == spec["failedJobsHistoryLimit"] == 2
    pod = spec["jobTemplate"]["spec"]["template"]
    container = container_of(pod)
    assert container["image"] == "registry/master:1"
    assert container["command"][-2:] == [
        "backstay.kubernetes.scheduled_run",
        "/backstay/job/job.json",
    ]
    assert pod["spec"]["serviceAccountName"] == "backstay-job-schedule"
    assert {"name": "job", "configMap": {"name": "backstay-census.schedule"}} in pod["spec"][
        "volumes"
    ]
    assert objects.files["metadata"]["name"] == "backstay-census.schedule"
    assert JobSpec.from_json(objects.files["data"]["job.json"]) == scheduled(
        master={"image": "registry/master:1"}
    )
    # What looks for the job master's Pod does not find that of a run.
    selector = made(job()).deployment["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= pod["metadata"]["labels"].items()


def test_a_run_that_is_over_is_not_tried_again() -> None:
    assert {*RUN_ENDS} <= {*JOB_CODES}
    assert ExitCode.AGAIN not in RUN_ENDS
    # No run looks for servers by itself.
    assert {*JOB_CODES} - {*RUN_ENDS, 0} == {4}


def test_the_job_of_a_run_belongs_to_its_cron_job_and_has_a_uid_of_its_own() -> None:
    cron_job = Owner("backstay-census", OWNED_BY.uid, "CronJob")
    objects = [
        job_objects(job(), {"model.py": ""}, run=run, owner=cron_job)
        for run in ("run-1", "run-2", "run-1")
    ]
    first, _, again = objects
    (owner,) = first.deployment["metadata"]["ownerReferences"]
    assert (owner["apiVersion"], owner["kind"]) == ("batch/v1", "CronJob")
    assert (first.run, made(job()).run) == ("run-1", "")
    words = [container_of(one.deployment["spec"]["template"])["command"] for one in objects]
    assert "--run" in words[0]
    assert words[0] == words[2] != words[1]
    assert first == again


@pytest.mark.parametrize("version", VERSIONS)
def test_the_objects_fit_the_schemas_of_kubernetes(version: str) -> None:
    cron_job = Owner("backstay-census", OWNED_BY.uid, "CronJob")
    full: dict[str, Any] = {
        "secrets": ["token"],
        "worker": {"requests": {"cpu": 1}},
        "pull_secrets": ["registry"],
    }
    of_jobs = (made(job(**full)), job_objects(job(**full), {}, run="run-1", owner=cron_job))
    objects = [one for each in of_jobs for one in (each.deployment, *each.owned)]
    for one in (*objects, pod_of(job(**full))):
        kubernetes_validate.validate(one, version, strict=True)


def test_a_schedule_fits_the_schemas_of_kubernetes() -> None:
    for one in schedule_objects(scheduled(secrets=["token"]), {"model.py": ""}):
        # The schema of 1.27 wants of each rule what its text calls optional.
        kubernetes_validate.validate(one, VERSIONS[-1], strict=True)
