"""What a job master tells Prometheus: parsed, documented, and served when the port is free."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from backstay._proto.v1 import job_pb2
from backstay.job_spec import AlertSpec, DataSpec, JobSpec, ProgressiveSpec
from backstay.master import prometheus
from backstay.master.prometheus import JobCollector, serve_metrics
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import counting_spec, master_of
from tests.unit.memory_nodes import run

RULE = AlertSpec(metric="auc", below=0.7, for_windows=2)
SPEC = JobSpec(
    name="clicks",
    model="model.py",
    training=DataSpec(paths=("data.csv",)),
    progressive=ProgressiveSpec(by="country"),
    alerts=(RULE, AlertSpec(metric="auc", below=0.6)),
)


def status() -> job_pb2.JobStatus:
    told = job_pb2.JobStatus(state="running", examples=100, steps=7, loss=0.5, workers_desired=3)
    told.workers.add(id="a", alive=True, staleness_sum=20, staleness_buckets=[2, 3, 4])
    told.workers.add(alive=False)
    told.tasks.done = 4
    told.stream.lag_records, told.stream.lag_s, told.stream.dropped_records = 30, 2.5, 1
    told.progressive.examples = 90
    told.progressive.skipped = 2
    told.progressive.decayed.auc = 0.75
    told.progressive.by["de"].calibration = 1.5
    window = told.progressive.windows.add(number=3)
    window.window.logloss = 0.25
    window.window_by["de"].auc = 0.5
    told.progressive.alerts.append("auc below 0.7 for 3 windows (0.6 in the last)")
    return told


def samples(
    spec: JobSpec, told: job_pb2.JobStatus | None
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(spec, lambda: told))
    text = generate_latest(registry).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("job") == spec.name
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def test_the_figures_of_a_job() -> None:
    found = samples(SPEC, status())
    for name, labels, value in [
        ("backstay_job_state", {"state": "running"}, 1),
        ("backstay_job_state", {"state": "failed"}, 0),
        ("backstay_job_examples_total", {}, 100),
        ("backstay_job_loss", {}, 0.5),
        ("backstay_job_workers", {"kind": "alive"}, 1),
        ("backstay_job_workers", {"kind": "desired"}, 3),
        ("backstay_job_tasks", {"state": "done"}, 4),
        ("backstay_job_push_staleness_bucket", {"worker": "a", "le": "1.0"}, 5),
        ("backstay_job_push_staleness_bucket", {"worker": "a", "le": "+Inf"}, 9),
        ("backstay_job_push_staleness_sum", {"worker": "a"}, 20),
        ("backstay_job_lag_records", {}, 30),
        ("backstay_job_lag_seconds", {}, 2.5),
        ("backstay_job_dropped_records", {}, 1),
        ("backstay_job_predicted_total", {}, 90),
        ("backstay_job_predictions_skipped_total", {}, 2),
        ("backstay_job_prediction_windows_total", {}, 3),
        ("backstay_job_prediction_auc", {"over": "decayed", "value": ""}, 0.75),
        ("backstay_job_prediction_auc", {"over": "window", "value": "de"}, 0.5),
        ("backstay_job_prediction_logloss", {"over": "window", "value": ""}, 0.25),
        ("backstay_job_prediction_calibration", {"over": "decayed", "value": "de"}, 1.5),
        ("backstay_job_alert", {"alert": "auc below 0.7"}, 1),
        ("backstay_job_alert", {"alert": "auc below 0.6"}, 0),
    ]:
        assert found[name, tuple(sorted(labels.items()))] == value, (name, labels)
    assert ("backstay_job_prediction_auc", (("over", "window"), ("value", ""))) not in found
    plain = samples(replace(SPEC, progressive=None, alerts=()), job_pb2.JobStatus())
    assert not any("predict" in name or "alert" in name for name, _ in plain)
    assert ("backstay_job_loss", ()) not in plain
    assert samples(SPEC, None) == {}


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
    return text


def test_a_taken_address_is_the_jobs_trouble_until_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "RETRY_PAUSE_S", 0.01)

    async def scenario(backend: MemoryBackend) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            spec = counting_spec(tmp_path, prometheus=f"127.0.0.1:{port}")
            async with master_of(MemoryStore(backend), spec, 1) as (_, job):
                serving = asyncio.create_task(serve_metrics(job, status))
                while not job.trouble.get("prometheus"):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                assert f"prometheus: metrics: 127.0.0.1:{port}" in job.trouble["prometheus"]
                taken.close()
                while job.trouble["prometheus"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                text = await asyncio.to_thread(scrape, port)
                assert 'backstay_job_examples_total{job="counting"} 100.0' in text
                serving.cancel()
                await asyncio.wait({serving})
            async with master_of(MemoryStore(backend), counting_spec(tmp_path), 2, replaces=1) as (
                _,
                job,
            ):
                # It is at once over where no address is named.
                await serve_metrics(job, status)

    run(scenario)
