"""The figures of a job over time: a file with a JSON object a line, and TensorBoard event files.

The log appends to ``metrics.jsonl`` in the job's log folder. A job that goes on appends there, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from backstay._proto.v1 import job_pb2
from backstay.errors import ConfigError

__all__ = ["FILE_NAME", "MetricsLog", "figures_of"]

FILE_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
SCALARS = ("loss", "examples_per_s", "workers_alive")


def figures_of(status: job_pb2.JobStatus) -> dict[str, Any]:
    """Return what a line says of a job: plain values, None where nothing is known yet."""
    figures = {
        "time_s": status.now_ms / 1000,
        "state": status.state,
        "kind": kind_name(status.kind),
        "round": status.round,
        "step": status.steps,
        "examples": status.examples,
        "examples_per_s": round(status.examples_per_s, 3),
        "loss": status.loss if status.HasField("loss") else None,
        "tasks_done": status.tasks.done,
        "tasks_total": status.tasks.total,
        "dead_letters": status.dead_letters,
        "bad_records": status.bad_records,
        "workers_alive": sum(worker.alive for worker in status.workers),
        "workers_desired": status.workers_desired,
    }
    if status.HasField("stream"):
        stream = status.stream
        figures["lag_records"] = stream.lag_records if stream.HasField("lag_records") else None
        figures["dropped_records"] = stream.dropped_records
    return figures


def kind_name(kind: int) -> str:
    """Return the word for a kind of task: training, evaluation, prediction, train_end."""
    return job_pb2.TaskKind.Name(kind).removeprefix("TASK_KIND_").lower()  # type: ignore[arg-type]


class MetricsLog:
    """Writes the figures of one job; a context manager."""

    def __init__(self, log_dir: Path, *, tensorboard: bool) -> None:
        """Open the files.

        Args:
            log_dir: Folder of the job.
            tensorboard: Write event files to ``tensorboard`` in it as well.

        Raises:
            ConfigError: The folder cannot be written to, or tensorboardX is not installed.
        """
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            self._file = (log_dir / FILE_NAME).open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"log_dir: cannot write to {log_dir}: {error.strerror}") from error
        try:
            self._events = _event_writer(log_dir / TENSORBOARD_FOLDER) if tensorboard else None
        except BaseException:
            self._file.close()
            raise
        self._last: tuple[int, str, int, int] | None = None
        self._evaluations: set[tuple[int, int]] = set()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def seen(self, status: job_pb2.JobStatus) -> None:
        """Take note of evaluations that are in the log already: those of an earlier run."""
        self._evaluations |= {(one.round, one.steps) for one in status.evaluations}

    def write(self, status: job_pb2.JobStatus) -> None:
        """Write a line if something has changed, and one for each new evaluation."""
        figures = figures_of(status)
        lag = status.stream.lag_records
        now = (status.steps, status.state, status.tasks.done, lag)
        if now != self._last:
            self._last = now
            self._line(figures)
            self._scalars({name: figures[name] for name in SCALARS}, status.steps, status.now_ms)
        for one in status.evaluations:
            if (one.round, one.steps) in self._evaluations:
                continue
            self._evaluations.add((one.round, one.steps))
            metrics = dict(sorted(one.metrics.items()))
            self._line(
                {
                    "time_s": status.now_ms / 1000,
                    "evaluation": one.round,
                    "step": one.steps,
                    "records": one.records,
                    "metrics": metrics,
                }
            )
            named = {f"evaluation/{name}": value for name, value in metrics.items()}
            self._scalars(named, one.steps, status.now_ms)

    def _line(self, document: dict[str, Any]) -> None:
        self._file.write(json.dumps(document) + "\n")
        # Others follow the file while the job runs.
        self._file.flush()

    def _scalars(self, values: Mapping[str, float | None], step: int, now_ms: int) -> None:
        if self._events is None:
            return
        for name, value in values.items():
            if value is not None:
                self._events.add_scalar(name, value, step, walltime=now_ms / 1000)
        self._events.flush()


def _event_writer(folder: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "tensorboard: tensorboardX is not installed; pip install 'backstay[tensorboard]'"
        ) from error
    return SummaryWriter(str(folder))
