"""What is missing or forbidden when a job begins on a real cluster is told, and can be mended."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from backstay.kubernetes.objects import FILES_BYTES_MAX
from backstay.kubernetes.pod_template import files_of
from backstay.kubernetes.published_status import read_status
from tests.kubernetes.backstay_image import IMAGE
from tests.kubernetes.job_parts import change_rights
from tests.kubernetes.namespace import is_ready, pod
from tests.kubernetes.test_jobs import JOB, LIMIT_S, KubernetesJob, both_work, job

__all__ = ["job"]

pytestmark = [pytest.mark.kubernetes, pytest.mark.torch, pytest.mark.timeout(600)]

NAME = f"backstay-{JOB}"


class Followed:
    """A command that follows a job, and what it has said so far."""

    def __init__(self, process: subprocess.Popen[bytes], said: Path) -> None:
        self._process = process
        self._said = said

    @property
    def said(self) -> str:
        return self._said.read_text(encoding="utf-8")

    def code(self) -> int:
        """Wait for its end; return its exit code."""
        return self._process.wait(LIMIT_S)


@contextmanager
def training(job: KubernetesJob, *words: str) -> Iterator[Followed]:
    """Run ``backstay train`` beside the test; it is ended at the latest with the block."""
    given = ["--on", "kubernetes", "--namespace", job.namespace.name, *words]
    said = job.folder / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "backstay.cli", "train", "job.yaml", *given],
            cwd=job.folder,
            env=job.env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield Followed(process, said)
    finally:
        process.kill()
        process.wait()


def allow_pods(job: KubernetesJob, count: int) -> None:
    """Have a quota that allows so many Pods in the namespace."""
    body: dict[str, Any] = {"metadata": {"name": "pods"}, "spec": {"hard": {"pods": str(count)}}}
    core, name = job.namespace.core, job.namespace.name
    if core.list_namespaced_resource_quota(name).items:
        core.patch_namespaced_resource_quota("pods", name, body)
        return
    core.create_namespaced_resource_quota(name, body)

    def counts() -> bool:
        # Before the controller has counted, the quota refuses everything.
        (quota,) = core.list_namespaced_resource_quota(name).items
        return bool(quota.status.used)

    job.wait_until("the quota counts", counts)


def files_name(job: KubernetesJob) -> str:
    """Return the name of the ConfigMap with the files of the job that is there."""
    deployment = job.api.get("deployments", NAME)
    assert deployment is not None
    return files_of(deployment["spec"]["template"])


def keep_files(job: KubernetesJob) -> None:
    """Run a Pod that uses the files of the job that is there."""
    files = {"name": "job", "configMap": {"name": files_name(job)}}
    body = pod("keeper", ["sleep", "600"], container={"image": IMAGE}, volumes=[files])
    job.namespace.run(body)
    job.namespace.wait("keeper", is_ready)


def test_a_missing_secret_is_told_and_the_job_begins_when_it_is_there(job: KubernetesJob) -> None:
    with training(job, "--epochs", "1", "--set", "kubernetes.secrets=[nowhere]") as followed:
        job.wait_until("the Secret is named", lambda: 'secret "nowhere" not found' in followed.said)
        assert "the job master waits for CreateContainerConfigError" in followed.said
        shown = job.jobs("list")
        assert "starting" in shown.stdout, shown.stderr
        job.namespace.core.create_namespaced_secret(
            job.namespace.name, {"metadata": {"name": "nowhere"}, "stringData": {"A": "b"}}
        )
        assert followed.code() == 0, followed.said


def test_a_secret_that_only_workers_miss_ends_the_job_with_its_name(job: KubernetesJob) -> None:
    container = "{name: worker, envFrom: [{secretRef: {name: nowhere}}]}"
    template = f"kubernetes.worker.pod_template={{spec: {{containers: [{container}]}}}}"
    done = job.train("--set", template)
    assert done.returncode == 1, done.stderr
    assert 'could not be started:\nCreateContainerConfigError: secret "nowhere" not found' in (
        done.stderr
    )


def test_a_worker_that_ran_out_of_memory_is_told_and_the_next_one_gets_more_if_the_job_says_so(
    job: KubernetesJob,
) -> None:
    # The framework alone takes more.
    limits = ("--set", "kubernetes.worker.limits={memory: 64Mi}")
    done = job.train(*limits)
    assert done.returncode == 1, done.stderr
    assert "ran out of memory" in done.stderr
    assert "its memory limit is 64Mi; kubernetes.worker.limits sets another" in done.stderr
    assert "may use" not in done.stderr
    # While a Pod of the first job is there, its node does not forget what that job was.
    keep_files(job)
    more = ("--set", "kubernetes.more_memory={factor: 10, max: 1Gi}")
    done = job.train(*limits, *more, "--set", "workers.max_relaunches=3", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert "workers that begin from now on may use 640Mi" in done.stderr


def test_a_limit_range_below_the_memory_that_is_to_come_is_told_and_borne(
    job: KubernetesJob,
) -> None:
    most = {"memory": "600Mi"}
    ranges = [{"type": "Container", "max": most, "default": most}]
    body = {"metadata": {"name": "memory"}, "spec": {"limits": ranges}}
    job.namespace.core.create_namespaced_limit_range(job.namespace.name, body)
    limits = ("--set", "kubernetes.worker.limits={memory: 64Mi}")
    more = ("--set", "kubernetes.more_memory={factor: 10, max: 1Gi}")
    with training(job, *limits, *more, "--set", "workers.max_relaunches=3", "--epochs", "1") as one:
        told = "workers get 600Mi of memory where kubernetes.more_memory gives 640Mi"
        job.wait_until("it is told", lambda: told in one.said)
        assert one.code() == 0, one.said


def test_an_init_container_that_fails_ends_the_job_with_its_words(job: KubernetesJob) -> None:
    script = "echo no such bucket; exit 3"
    first = f"{{name: fetch, image: {IMAGE}, imagePullPolicy: Never, command: [sh, -c, {script}]}}"
    template = f"kubernetes.worker.pod_template={{spec: {{initContainers: [{first}]}}}}"
    done = job.train("--set", template)
    assert done.returncode == 1, done.stderr
    assert "init container fetch: Error, exit code 3" in done.stderr
    assert "no such bucket" in done.stderr


@pytest.mark.chaos
def test_a_registry_that_is_away_is_told_and_no_failure(job: KubernetesJob) -> None:
    container = "{name: worker, image: '127.0.0.1:1/nothing:1', imagePullPolicy: Always}"
    template = f"kubernetes.worker.pod_template={{spec: {{containers: [{container}]}}}}"
    with training(job, "--set", template) as followed:
        job.wait_until("it is told", lambda: "ErrImagePull" in followed.said)
        published = read_status(job.api, JOB)
        assert published is not None
        assert (published.over, dict(published.counts)) == ("", {})
        # Others come in their places, though the job allows no failure.
        replaced = job.wait("others come", lambda one: one.counts.get("NO_IMAGE", 0) >= 2)
        assert (replaced.over, set(replaced.counts)) == ("", {"NO_IMAGE"})
        job.wait_until("they have Pods", lambda: set(job.workers()) >= {"w-2", "w-3"})


@pytest.mark.chaos
def test_a_registry_that_does_not_exist_is_told_at_once_and_ends_the_job(
    job: KubernetesJob,
) -> None:
    with pytest.raises(socket.gaierror) as asked:
        socket.getaddrinfo("nowhere.invalid", 443)
    if asked.value.errno != socket.EAI_NONAME:
        pytest.skip(f"no name server of this machine knows that: {asked.value}")
    container = "{name: worker, image: 'nowhere.invalid/nothing:1', imagePullPolicy: Always}"
    template = f"kubernetes.worker.pod_template={{spec: {{containers: [{container}]}}}}"
    with training(job, "--set", template) as followed:
        job.wait_until("it is told", lambda: "wait for ErrImagePull" in followed.said)
        assert "no such host" in followed.said
        # As with an image that is not there.
        assert followed.code() == 1, followed.said
    assert "no worker can be started: " in followed.said


def test_a_volume_of_a_missing_secret_is_told(job: KubernetesJob) -> None:
    volumes = "kubernetes.worker.volumes=[{secret: nowhere, mount_path: /keys}]"
    with training(job, "--epochs", "1", "--set", volumes) as followed:
        job.wait_until(
            "it is told",
            lambda: "for volumes, network or image: `kubectl describe pod" in followed.said,
        )
        job.namespace.core.create_namespaced_secret(
            job.namespace.name, {"metadata": {"name": "nowhere"}, "stringData": {"A": "b"}}
        )
        assert followed.code() == 0, followed.said


def test_an_error_in_the_users_code_is_shown_with_its_traceback(job: KubernetesJob) -> None:
    settings = yaml.safe_load((job.folder / "job.yaml").read_text(encoding="utf-8"))
    model = job.folder / settings["model"]
    fault = "\n\nraise ValueError('a fault of the user')\n"
    model.write_text(model.read_text(encoding="utf-8") + fault, encoding="utf-8")
    done = job.train()
    assert done.returncode == 1, done.stderr
    shown = job.jobs("show", JOB)
    for said in (done.stderr, shown.stdout):
        assert "Traceback (most recent call last)" in said, said
        assert ", in <module>" in said, said
        assert "ValueError: a fault of the user" in said, said
    assert "FAILED" in shown.stdout
    told = job.events()
    assert any("ValueError: a fault of the user" in one for one in told["WorkerFailed"]), told
    assert "JobFailed" in told


def test_a_long_traceback_keeps_its_first_line_and_the_users_frames(job: KubernetesJob) -> None:
    settings = yaml.safe_load((job.folder / "job.yaml").read_text(encoding="utf-8"))
    model = job.folder / settings["model"]
    # More than the 2 KiB of a log that a node keeps.
    steps = "".join(f"def step_{n}():\n    return step_{n + 1}()\n" for n in range(60))
    fault = f"\n\n{steps}def step_60():\n    raise ValueError('a fault of the user')\nstep_0()\n"
    model.write_text(model.read_text(encoding="utf-8") + fault, encoding="utf-8")
    assert job.train().returncode == 1
    shown = job.jobs("show", JOB)
    for told in ("Traceback (most recent call last)", "in step_0", "raise ValueError"):
        assert told in shown.stdout, shown.stdout


# Stops the process of the worker: it answers nothing, and does not hear that it is to end.
STOP_WORKER = """
import os, pathlib, signal
for one in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if b"backstay.trainer.worker.cli" in one.read_bytes() and int(one.parent.name) != os.getpid():
        os.kill(int(one.parent.name), signal.SIGSTOP)
"""


@pytest.mark.chaos
def test_a_worker_that_hangs_is_replaced_and_counted_as_such(job: KubernetesJob) -> None:
    words = ("--epochs", "500", "--set", "workers.max_relaunches=3")
    assert job.train("--detach", *words).returncode == 0
    job.wait("two workers", both_work)
    job.namespace.execute(job.pod_of("w-0"), "python3", "-c", STOP_WORKER)
    counted = job.wait("its end is told", lambda one: bool(one.counts))
    assert dict(counted.counts) == {"HUNG": 1}
    assert [(worker, how) for worker, how, _ in counted.exits] == [("w-0", "hung")]
    job.wait("another works", both_work)
    assert job.jobs("stop", JOB).returncode == 0
    assert "WorkerHung" in job.events()


def test_workers_for_which_there_is_no_room_are_told_and_waited_for(job: KubernetesJob) -> None:
    assert job.train("--detach", "--set", "kubernetes.worker.requests={cpu: 1000}").returncode == 0
    told = job.wait("it is told", lambda one: "Insufficient cpu" in trouble_of(one))
    assert "2 workers wait for room on a node: " in trouble_of(told)
    assert (told.over, dict(told.counts)) == ("", {})
    assert job.jobs("stop", JOB).returncode == 0
    job.wait_until("their Pods are gone", lambda: job.workers() == {})


def test_a_worker_that_is_evicted_is_counted_as_such_and_replaced(job: KubernetesJob) -> None:
    assert job.train("--detach", "--epochs", "10").returncode == 0
    job.wait("two workers", both_work)
    name = job.pod_of("w-0")
    eviction = {"metadata": {"name": name, "namespace": job.namespace.name}}
    job.namespace.core.create_namespaced_pod_eviction(name, job.namespace.name, eviction)
    counted = job.wait("another works", lambda one: bool(one.counts) and both_work(one))
    assert (counted.over, dict(counted.counts)) == ("", {"EVICTED": 1})
    # Fewer are wanted: the end of the one that goes is nobody's doing.
    assert job.jobs("scale", JOB, "1").returncode == 0
    job.wait_until("one is left", lambda: len(job.workers()) == 1)
    ended = job.wait("the end", lambda one: bool(one.over))
    assert ended.over == "done"
    assert set(ended.counts) <= {"EVICTED", "FINISHED"}
    assert "records_counted_once true" in job.audit()


@pytest.mark.chaos
def test_a_quota_that_forbids_workers_is_told_and_the_others_work(job: KubernetesJob) -> None:
    # The server, the job master and one worker.
    allow_pods(job, 3)
    assert job.train("--detach", "--epochs", "20").returncode == 0
    told = job.wait("it is told", lambda one: "exceeded quota" in trouble_of(one))
    assert told.status is not None
    job.wait("one works", lambda one: one.status is not None and len(one.status.workers) == 1)
    shown = job.jobs("show", JOB)
    assert "exceeded quota" in shown.stdout, shown.stdout + shown.stderr
    allow_pods(job, 4)
    raised = job.wait("both work", both_work)
    assert not raised.over
    ended = job.wait("the end", lambda one: bool(one.over))
    assert (ended.over, trouble_of(ended)) == ("done", "")
    assert "records_counted_once true" in job.audit()


def test_a_quota_that_forbids_the_job_master_is_told(job: KubernetesJob) -> None:
    allow_pods(job, 1)
    with training(job, "--epochs", "1") as followed:
        job.wait_until("it is told", lambda: "exceeded quota" in followed.said)
        assert "the job master has no Pod yet: " in followed.said
        allow_pods(job, 4)
        assert followed.code() == 0, followed.said


def test_a_right_that_is_missing_is_told_and_the_job_begins_when_it_is_there(
    job: KubernetesJob,
) -> None:
    change_rights(job.namespace, without=("pods", "create"))
    with training(job, "--epochs", "1") as followed:
        told = "The ServiceAccount backstay-job-master lacks the right to create pods"
        job.wait_until("it is told", lambda: told in followed.said)
        shown = job.jobs("show", JOB)
        assert told in shown.stdout, shown.stdout + shown.stderr
        change_rights(job.namespace)
        assert followed.code() == 0, followed.said


def test_a_job_master_that_may_not_see_its_job_says_so(job: KubernetesJob) -> None:
    change_rights(job.namespace, without=("configmaps", "get"))
    with training(job, "--epochs", "1") as followed:
        told = "lacks the right to get configmaps"
        job.wait_until("it is told", lambda: told in followed.said)
        change_rights(job.namespace)
        assert followed.code() == 0, followed.said


def test_a_name_that_another_job_has_is_refused(job: KubernetesJob) -> None:
    assert job.train("--detach", "--epochs", "10").returncode == 0
    refused = job.train("--epochs", "10", "--batch-size", "50")
    assert refused.returncode == 1
    assert f"job {JOB!r} runs on Kubernetes already, with other settings or files" in refused.stderr
    # The same file is the same job.
    assert job.train("--detach", "--epochs", "10").returncode == 0


def test_a_config_map_above_its_limit_is_refused_with_what_to_do(job: KubernetesJob) -> None:
    name, words = "more.py", ("--detach", "--epochs", "1")
    (job.folder / name).write_text("", encoding="utf-8")
    assert job.train(*words).returncode == 0
    carrier = files_name(job)
    files = job.api.get("configmaps", carrier)
    assert files is not None
    size = sum(len(key) + len(text.encode()) for key, text in files["data"].items())
    job.api.delete("deployments", NAME)
    job.wait_until("it is gone", lambda: job.api.get("configmaps", carrier) is None)
    left = FILES_BYTES_MAX - size
    (job.folder / name).write_text("#" * (left + 1), encoding="utf-8")
    refused = job.train(*words)
    assert refused.returncode == 2
    assert "Put them into the image, and name their folder there: kubernetes.model_folder" in (
        refused.stderr
    )
    assert job.api.get("deployments", NAME) is None
    # The largest that is not refused is one that Kubernetes takes.
    (job.folder / name).write_text("#" * left, encoding="utf-8")
    done = job.train("--epochs", "1")
    assert done.returncode == 0, done.stderr


def trouble_of(published: Any) -> str:
    return "" if published.status is None else str(published.status.trouble)
