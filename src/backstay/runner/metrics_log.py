"""The figures of a job over time: a file with a JSON object a line, and TensorBoard event files.

The log appends to ``metrics.jsonl`` in the job's log folder. A job that goes on appends there, too.
A file that is full becomes ``metrics.jsonl.1``, and the one that had this name is gone: a job that
never ends keeps its newest figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from backstay._proto.v1 import job_pb2
from backstay.errors import ConfigError

__all__ = ["FILE_NAME", "SCORES", "MetricsLog", "evaluations_of", "figures_of", "score_figures"]

FILE_NAME = "metrics.jsonl"
OLD_FILE_NAME = "metrics.jsonl.1"
FILE_BYTES_MAX = 64 * 1024 * 1024
TENSORBOARD_FOLDER = "tensorboard"
SCALARS = ("loss", "examples_per_s", "workers_alive")
SCORES = ("auc", "logloss", "calibration")


def figures_of(status: job_pb2.JobStatus) -> dict[str, Any]:
    """Return what a line says of a job: plain values, None where nothing is known yet."""
    progressive = {"progressive": _progressive(status)} if status.HasField("progressive") else {}
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
        **progressive,
    }
    if status.HasField("stream"):
        stream = status.stream
        figures["lag_records"] = stream.lag_records if stream.HasField("lag_records") else None
        figures["lag_s"] = round(stream.lag_s, 3) if stream.HasField("lag_s") else None
        figures["dropped_records"] = stream.dropped_records
    return figures


def evaluations_of(status: job_pb2.JobStatus) -> list[dict[str, Any]]:
    """Return the evaluations of a job: of each its round, the step, and the metrics."""
    return [
        {"round": one.round, "step": one.steps, "metrics": dict(one.metrics)}
        for one in status.evaluations
    ]


def kind_name(kind: int) -> str:
    """Return the word for a kind of task: training, evaluation, prediction, train_end."""
    return job_pb2.TaskKind.Name(kind).removeprefix("TASK_KIND_").lower()  # type: ignore[arg-type]


def score_figures(figures: job_pb2.ScoreFigures) -> dict[str, float | None]:
    """Return figures of predictions by name, None where one is not known; without ``skipped``."""
    return {
        "examples": _whole(figures.examples),
        **{name: _known(figures, name) for name in SCORES},
    }


def _progressive(status: job_pb2.JobStatus) -> dict[str, Any]:
    """Return decayed figures, and how many records were predicted since the beginning."""
    told = status.progressive
    return {
        **score_figures(told.decayed),
        "examples": told.examples,
        "skipped": told.skipped,
        "windows": told.windows[-1].number if told.windows else 0,
        "alerts": list(told.alerts),
    }


def _known(figures: job_pb2.ScoreFigures, name: str) -> float | None:
    value: float = getattr(figures, name)
    return value if figures.HasField(name) else None  # type: ignore[arg-type]


def _whole(number: float) -> float:
    return int(number) if number.is_integer() else round(number, 3)


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
        self._folder = log_dir
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise ConfigError(f"log_dir: cannot write to {log_dir}: {error.strerror}") from error
        try:
            self._events = _event_writer(log_dir / TENSORBOARD_FOLDER) if tensorboard else None
        except BaseException:
            self._file.close()
            raise
        self._last: tuple[int, str, int, int] | None = None
        self._evaluations: set[tuple[int, int]] = set()
        self._windows: set[tuple[int, int]] = set()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def seen(self, status: job_pb2.JobStatus) -> None:
        """Take note of what is in the log already: evaluations and windows of an earlier run."""
        self._evaluations |= {(one.round, one.steps) for one in status.evaluations}
        self._windows |= {(one.number, one.steps) for one in status.progressive.windows}

    def write(self, status: job_pb2.JobStatus) -> None:
        """Write a line if something has changed, and one for each new evaluation and window."""
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

        for window in status.progressive.windows:
            if (window.number, window.steps) not in self._windows:
                self._windows.add((window.number, window.steps))
                self._write_window(window, status.now_ms)

    def _write_window(self, window: job_pb2.ScoreWindow, now_ms: int) -> None:
        figures, decayed = score_figures(window.window), score_figures(window.decayed)
        by: dict[str, dict[str, Any]] = {
            value: {**score_figures(one), "decayed": score_figures(window.decayed_by[value])}
            for value, one in sorted(window.window_by.items())
        }
        self._line(
            {
                "time_s": now_ms / 1000,
                "window": window.number,
                "step": window.steps,
                **figures,
                "skipped": _whole(window.window.skipped),
                "decayed": decayed,
                "by": by,
                "alerts": list(window.alerts),
            }
        )
        scalars = {f"progressive/{name}": figures[name] for name in SCORES}
        scalars |= {f"progressive/decayed_{name}": decayed[name] for name in SCORES}
        for value, one in by.items():
            scalars |= {f"progressive/{name}/{value}": one[name] for name in SCORES}
        self._scalars(scalars, window.steps, now_ms)

    def _line(self, document: dict[str, Any]) -> None:
        line = json.dumps(document) + "\n"
        if self._bytes and self._bytes + len(line) > FILE_BYTES_MAX:
            self._begin_anew()
        self._file.write(line)
        # Others follow the file while the job runs.
        self._file.flush()
        self._bytes += len(line)

    def _open(self) -> None:
        self._file = (self._folder / FILE_NAME).open("a", encoding="utf-8")
        self._bytes = self._file.tell()

    def _begin_anew(self) -> None:
        """Put the full file aside; if that fails, it goes on to grow."""
        with suppress(OSError):
            (self._folder / FILE_NAME).replace(self._folder / OLD_FILE_NAME)
            full = self._file
            self._open()
            full.close()

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
