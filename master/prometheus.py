"""The figures of a job for Prometheus, made at each scrape from the status of the job.

A job whose address cannot be listened on goes on without: that is its trouble, and is tried again.
The text of each metric is its row of docs/reference/job-metrics.md. May import the endpoint, the
job and its status; decides nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from backstay._proto.v1 import job_pb2
from backstay.addresses import split_address
from backstay.errors import ListenError
from backstay.job_spec import JobSpec
from backstay.master.job import Job
from backstay.metrics_endpoint import MetricsEndpoint, doubling_buckets

__all__ = ["JobCollector", "groups", "serve_metrics"]

RETRY_PAUSE_S = 5.0
# A scrape waits so long for the event loop.
STATUS_LIMIT_S = 5.0
# With more workers their histograms are summed.
HISTOGRAMS_MAX = 256
STATES = ("running", "done", "stopped", "failed", "unsaved")
SCORES = {
    "auc": "Area under the curve of predictions made before training, over the last window or "
    "decayed; value: of the column `by`, empty for all records. No sample: not known.",
    "logloss": "Logloss of those predictions, likewise.",
    "calibration": "Mean prediction over the observed rate, likewise.",
}

log = logging.getLogger(__name__)


class JobCollector(Collector):
    """Makes the metrics of one job.

    Args:
        spec: The job.
        status: Returns how it goes; called on any thread. None: it cannot be told now.
    """

    def __init__(self, spec: JobSpec, status: Callable[[], job_pb2.JobStatus | None]) -> None:
        self._spec = spec
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """Return every metric as it is now."""
        status = self._status()
        if status is None:
            return ()
        return itertools.chain.from_iterable(groups(status, self._spec).values())


def groups(status: job_pb2.JobStatus, spec: JobSpec) -> dict[str, list[Metric]]:
    """Return every metric of a job, by the table of docs/reference/job-metrics.md that has it."""
    made = {
        "job": _job(status),
        "stream": _stream(status),
        "progressive": _progressive(status.progressive, spec),
    }
    metrics = {name: [one.of(spec.name) for one in some] for name, some in made.items()}
    metrics["job"].append(_staleness(status, spec.name))
    return metrics


class _Family:
    """One metric: its value, or its values by the tuple of its labels beside ``job``."""

    def __init__(
        self,
        name: str,
        text: str,
        values: float | Mapping[Any, float],
        labels: tuple[str, ...] = (),
        *,
        is_counter: bool = False,
    ) -> None:
        self._values = values if isinstance(values, Mapping) else {(): values}
        kind = CounterMetricFamily if is_counter else GaugeMetricFamily
        self._family = kind(f"backstay_job_{name}", text, labels=("job", *labels))

    def of(self, job: str) -> Metric:
        for labels, value in self._values.items():
            self._family.add_metric([job, *labels], value)
        return self._family


def _job(status: job_pb2.JobStatus) -> Iterator[_Family]:
    states = {(state,): float(state == status.state) for state in STATES}
    yield _Family(
        "state",
        "1 for the present state: running, done, stopped, failed or unsaved.",
        states,
        ("state",),
    )
    yield _Family("examples", "Records of done tasks.", status.examples, is_counter=True)
    yield _Family("steps", "Batches of all workers.", status.steps, is_counter=True)
    yield _Family(
        "examples_per_second", "Records a second of the workers alive.", status.examples_per_s
    )
    losses = {(): status.loss} if status.HasField("loss") else {}
    yield _Family("loss", "Mean of the workers' last losses.", losses)
    workers = {
        ("alive",): float(sum(worker.alive for worker in status.workers)),
        ("desired",): float(status.workers_desired),
    }
    yield _Family("workers", "Workers alive and desired.", workers, ("kind",))
    tasks = {
        (name,): float(getattr(status.tasks, name))
        for name in ("todo", "doing", "done", "dead_letters")
    }
    yield _Family(
        "tasks",
        "Tasks of the round under way: todo, doing, done, or dead letters.",
        tasks,
        ("state",),
    )
    yield _Family("bad_records", "Damaged records that were skipped.", status.bad_records)
    yield _Family("dead_letters", "Tasks that failed for good.", status.dead_letters)


def _staleness(status: job_pb2.JobStatus, job: str) -> Metric:
    told = [one for one in status.workers if one.staleness_buckets]
    by_name: dict[str, list[job_pb2.WorkerStatus]] = {}
    for one in told:
        name = one.id if len(told) <= HISTOGRAMS_MAX else ""
        by_name.setdefault(name, []).append(one)
    family = HistogramMetricFamily(
        "backstay_job_push_staleness",
        "Slots of pushes by the mean staleness of their push, since the worker's process began. "
        "With more than 256 workers all of them together.",
        labels=("job", "worker"),
    )
    for name, some in by_name.items():
        lists = [one.staleness_buckets for one in some]
        counts = [sum(column) for column in itertools.zip_longest(*lists, fillvalue=0)]
        total = float(sum(one.staleness_sum for one in some))
        family.add_metric([job, name], doubling_buckets(counts), total)
    return family


def _stream(status: job_pb2.JobStatus) -> Iterator[_Family]:
    if not status.HasField("stream"):
        return
    told = status.stream
    records = {(): float(told.lag_records)} if told.HasField("lag_records") else {}
    yield _Family(
        "lag_records", "Records that are there and not done. No sample: not known.", records
    )
    seconds = {(): told.lag_s} if told.HasField("lag_s") else {}
    yield _Family("lag_seconds", "Age of the oldest of them. No sample: not known.", seconds)
    yield _Family(
        "dropped_records",
        "Records that the source dropped before they were taken.",
        told.dropped_records,
    )


def _progressive(told: job_pb2.ProgressiveStatus, spec: JobSpec) -> Iterator[_Family]:
    if spec.progressive is None:
        return
    yield _Family("predicted", "Records predicted before training.", told.examples, is_counter=True)
    yield _Family(
        "predictions_skipped",
        "Records with unusable predictions or labels.",
        told.skipped,
        is_counter=True,
    )
    number = told.windows[-1].number if told.windows else 0
    yield _Family("prediction_windows", "Windows that have ended.", number, is_counter=True)
    figures = {("decayed", ""): told.decayed}
    figures |= {("decayed", value): one for value, one in told.by.items()}
    if told.windows:
        figures["window", ""] = told.windows[-1].window
        figures |= {("window", value): one for value, one in told.windows[-1].window_by.items()}
    for name, text in SCORES.items():
        values = {
            labels: float(getattr(one, name))
            for labels, one in figures.items()
            if one.HasField(name)  # type: ignore[arg-type]
        }
        yield _Family(f"prediction_{name}", text, values, ("over", "value"))
    # They begin with their rule.
    active = tuple(told.alerts)
    alerts = {(one.text,): float(any(_is_of(one.text, it) for it in active)) for one in spec.alerts}
    yield _Family("alert", "1 while the alert holds; its label is its rule.", alerts, ("alert",))


def _is_of(rule: str, words: str) -> bool:
    return words.startswith(f"{rule} for ")


async def serve_metrics(job: Job, status: Callable[[], job_pb2.JobStatus]) -> None:
    """Serve a job's metrics at the address that it names, until cancelled; at once if it has none.

    Args:
        job: The job.
        status: Returns how it goes; called in this event loop.
    """
    listen = job.spec.prometheus
    if not listen:
        return
    loop = asyncio.get_running_loop()

    async def now() -> job_pb2.JobStatus:
        return status()

    def asked() -> job_pb2.JobStatus | None:
        try:
            return asyncio.run_coroutine_threadsafe(now(), loop).result(STATUS_LIMIT_S)
        except FutureTimeoutError:
            return None

    collector = JobCollector(job.spec, asked)
    while True:
        try:
            endpoint = MetricsEndpoint(listen, collector)
        except ListenError as error:
            # Another job master may have it still.
            job.note_trouble("prometheus", f"prometheus: {error}")
            await asyncio.sleep(RETRY_PAUSE_S)
            continue
        job.note_trouble("prometheus", "")
        host = split_address("prometheus", listen)[0]
        log.info("metrics of the job at http://%s:%d/metrics", host, endpoint.port)
        with endpoint:
            await asyncio.Event().wait()
