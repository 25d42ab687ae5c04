"""``--on kubernetes``: what the command would make, and what it refuses without a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import backstay
from backstay.cli import main
from backstay.errors import ConfigError
from backstay.job_spec import JobSpec
from backstay.kubernetes.manifest import objects_of
from backstay.kubernetes.objects import has_own_servers

JOB = """
name: census
model: model.py
training: /data/a.csv
servers: {endpoints: ["ps-0:7000"]}
kubernetes:
  image: registry/backstay:1
  volumes: [{claim_name: data, mount_path: /data}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text("import features\n", encoding="utf-8")
    (tmp_path / "features.py").write_text("# beside it\n", encoding="utf-8")
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    return tmp_path


def train(folder: Path, *words: str) -> Result:
    given = ["train", str(folder / "job.yaml"), *words]
    return CliRunner(env={"BACKSTAY_ENDPOINT": ""}).invoke(main, given)


def test_a_dry_run_prints_the_objects(folder: Path) -> None:
    result = train(folder, "--on", "kubernetes", "--dry-run", "--namespace", "ads")
    assert result.exit_code == 0, result.output
    deployment, files, status = yaml.safe_load_all(result.output)
    assert deployment["kind"] == "Deployment"
    assert {one["metadata"]["namespace"] for one in (deployment, files, status)} == {"ads"}
    assert set(files["data"]) == {"job.json", "model.py", "features.py"}
    assert status["metadata"]["name"] == "backstay-census.status"


def test_a_dry_run_prints_servers_of_the_jobs_own(folder: Path) -> None:
    words = ["--servers", "2", "--set", "checkpoint.every=none"]
    words += ["--set", "servers.settings.store_endpoints=[etcd-0.etcd:2379]"]
    result = train(folder, "--on", "kubernetes", "--dry-run", *words)
    assert result.exit_code == 0, result.output
    # Shared parts of the objects are written out.
    assert "&id" not in result.output
    *_, service, budget, servers = yaml.safe_load_all(result.output)
    assert [one["kind"] for one in (service, budget)] == ["Service", "PodDisruptionBudget"]
    assert servers["spec"]["replicas"] == 2


def test_a_dry_run_of_a_job_with_a_schedule_prints_the_cron_job(folder: Path) -> None:
    words = ("--set", "schedule=0 3 * * *", "--set", "hooks.before=[fetch]")
    result = train(folder, "--on", "kubernetes", "--dry-run", *words)
    assert result.exit_code == 0, result.output
    cron_job, files = yaml.safe_load_all(result.output)
    assert (cron_job["kind"], cron_job["spec"]["schedule"]) == ("CronJob", "0 3 * * *")
    assert set(files["data"]) == {"job.json", "model.py", "features.py"}


def test_each_run_of_a_schedule_makes_the_servers_of_its_own(folder: Path) -> None:
    words = ["--on", "kubernetes", "--dry-run", "--servers", "2", "--set", "schedule='@daily'"]
    words += ["--set", "servers.settings.store_endpoints=[etcd-0.etcd:2379]"]
    words += ["--set", "checkpoint.url=s3://models/census"]
    result = train(folder, *words)
    assert result.exit_code == 0, result.output
    cron_job, files = yaml.safe_load_all(result.output)
    assert cron_job["kind"] == "CronJob"
    # What the Pod of a run makes of the job file that it finds.
    found = replace(JobSpec.from_json(files["data"]["job.json"]), schedule=None)
    for name in ("model.py", "features.py"):
        assert files["data"][name] == (folder / name).read_text(encoding="utf-8")
    run = objects_of(replace(found, model=str(folder / "model.py")), "census-1")
    assert run.servers is not None
    assert run.servers.stateful_set["spec"]["replicas"] == 2
    assert has_own_servers(run.deployment)
    assert 'checkpoint_url = "s3://models/census"' in run.files["data"]["pserver.toml"]
    again = objects_of(replace(found, model=str(folder / "model.py")), "census-2")
    assert again.servers is not None
    # New servers never meet the records of earlier ones.
    assert cluster_of(again.servers.stateful_set) != cluster_of(run.servers.stateful_set)


def cluster_of(stateful_set: dict[str, Any]) -> str:
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    (value,) = (one["value"] for one in container["env"] if one["name"] == "BACKSTAY_CLUSTER")
    return str(value)


def test_a_schedule_is_for_kubernetes_only(folder: Path) -> None:
    for words in ((), ("--local",)):
        result = train(folder, *words, "--set", "schedule='@daily'")
        assert result.exit_code == 2
        assert "Error: schedule: Kubernetes runs jobs by a schedule: give --on" in result.output
    with pytest.raises(ConfigError, match="schedule: `backstay train --on kubernetes` makes"):
        backstay.submit(folder / "job.yaml", on="kubernetes", schedule="@daily")


def test_an_evaluation_does_not_look_at_the_schedule(folder: Path) -> None:
    job = JOB + "validation: /data/b.csv\nschedule: '@daily'\n"
    (folder / "job.yaml").write_text(job, encoding="utf-8")
    words = ["evaluate", str(folder / "job.yaml"), "--on", "kubernetes", "--dry-run"]
    result = CliRunner(env={"BACKSTAY_ENDPOINT": ""}).invoke(main, words)
    assert next(yaml.safe_load_all(result.output))["kind"] == "Deployment"


def test_a_checkpoint_folder_that_only_one_server_has_is_warned_of(folder: Path) -> None:
    words = ["--on", "kubernetes", "--dry-run", "--set", "checkpoint.url=/ckpt"]
    own = ["--servers", "2", "--set", "servers.settings.store_endpoints=[etcd-0.etcd:2379]"]
    said = "checkpoint.url: /ckpt is in no volume of kubernetes.pserver.volumes"
    assert said in train(folder, *words, *own).stderr
    # A cluster that runs has a folder of its own.
    assert "checkpoint.url" not in train(folder, *words).stderr
    volumes = "kubernetes.pserver.volumes=[{claim_name: ckpt, mount_path: /ckpt}]"
    assert "checkpoint.url" not in train(folder, *words, *own, "--set", volumes).stderr


def test_flags_win_over_the_file(folder: Path) -> None:
    result = train(folder, "--on", "kubernetes", "--dry-run", "--image", "registry/backstay:2")
    deployment, *_ = yaml.safe_load_all(result.output)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry/backstay:2"


def test_a_model_in_the_image_is_not_carried(folder: Path) -> None:
    words = ("--on", "kubernetes", "--dry-run", "--set", "kubernetes.model_folder=/app/zoo")
    _, files, _ = yaml.safe_load_all(train(folder, *words).output)
    assert set(files["data"]) == {"job.json"}
    assert '"model": "/app/zoo/model.py"' in files["data"]["job.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--detach",), "--detach: goes with --on kubernetes"),
        (("--on", "kubernetes", "--local"), "--on and --local: give one of them"),
        (("--on", "kubernetes", "--config", "a.toml"), "--config: is not carried to Pods"),
        (("--on", "kubernetes", "--fresh"), "--fresh: not with --on kubernetes"),
        (("--on", "kubernetes", "--servers", "2"), "checkpoint.url: is missing; servers of a job"),
        (
            ("--on", "kubernetes", "--servers", "2", "--set", "checkpoint.every=none"),
            "servers.settings.store_endpoints: is missing; servers of a job on Kubernetes keep",
        ),
        (
            ("--on", "kubernetes", "--servers", "2", "--set", "schedule='@daily'"),
            "checkpoint.url: is missing; servers of a job",
        ),
        (
            ("--on", "kubernetes", "--set", "hooks.after=[ls]"),
            "hooks: on Kubernetes only a job with a schedule",
        ),
        (("--on", "kubernetes", "--set", "kubernetes=null"), "kubernetes: is missing; a job on"),
    ],
)
def test_what_cannot_run_there_is_refused(folder: Path, words: tuple[str, ...], said: str) -> None:
    result = train(folder, *words, "--dry-run")
    assert result.exit_code == 2, result.output
    assert f"Error: {said}" in result.output


def test_data_that_only_the_workers_have_is_warned_of(folder: Path) -> None:
    volumes = "[{claim_name: data, mount_path: /data}]"
    words = ("--set", "kubernetes.volumes=[]", "--set", f"kubernetes.worker.volumes={volumes}")
    result = train(folder, "--on", "kubernetes", "--dry-run", *words)
    assert result.exit_code == 0
    assert "training.paths: /data/a.csv is in no volume of the job master" in result.stderr
    assert "of the workers" not in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stop", "--reason"), "requires an argument"),
        (("show",), "Missing argument 'JOB'"),
        (("logs", "census", "--follow"), "leave out --endpoint"),
        (("show", "census", "--log-dir", "logs"), "leave out --endpoint"),
    ],
)
def test_jobs_on_kubernetes_take_words_as_the_command_does(
    words: tuple[str, ...], said: str
) -> None:
    result = CliRunner().invoke(main, ["jobs", "--on", "kubernetes", *words])
    assert result.exit_code == 2, result.output
    assert said in result.output


def test_a_model_file_that_is_too_large_is_refused_with_what_to_do(folder: Path) -> None:
    (folder / "features.py").write_text("#" * 1024 * 1024, encoding="utf-8")
    result = train(folder, "--on", "kubernetes", "--dry-run")
    assert result.exit_code == 2
    assert "a ConfigMap holds 1,048,576. Put them into the image" in result.output


def test_a_damaged_kubeconfig_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes")
    (folder / "config").write_text(": [broken\n", encoding="utf-8")
    monkeypatch.setenv("KUBECONFIG", str(folder / "config"))
    result = train(folder, "--on", "kubernetes")
    assert result.exit_code == 2, result.output
    assert "Error: --on kubernetes: the kubeconfig cannot be read" in result.output


def test_without_a_kubeconfig_the_command_says_what_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kubernetes")
    monkeypatch.setenv("KUBECONFIG", str(folder / "nothing"))
    result = train(folder, "--on", "kubernetes")
    assert result.exit_code == 2, result.output
    assert "Set KUBECONFIG" in result.output
