"""The status of a job in words, for people: one line, a summary, the figures of a table.

Values in, texts out.
"""

from __future__ import annotations

from backstay._proto.v1 import job_pb2
from backstay.runner.metrics_log import SCORES, kind_name, score_figures

__all__ = [
    "figures_text",
    "lag_text",
    "notes_text",
    "predictions_text",
    "progressive_text",
    "round_text",
    "summary_lines",
]


def round_text(status: job_pb2.JobStatus) -> str:
    """Return what the job does now, such as ``pass 2 of 10``."""
    kind = kind_name(status.kind)
    if kind == "training":
        if not status.round:
            return "no task now"  # Between two passes, or after the last one.
        if status.HasField("stream"):
            return f"period {status.round}"
        return f"pass {status.round} of {status.passes}"
    if kind == "unspecified":
        return status.state
    words = {"evaluation": f"evaluation {status.round}", "train_end": "end of training"}
    return words.get(kind, kind)


def metrics_text(status: job_pb2.JobStatus) -> str:
    """Return the metrics of the newest evaluation, such as ``auc 0.9012``; empty: none yet."""
    if not status.evaluations:
        return ""
    newest = status.evaluations[-1].metrics
    return "  ".join(f"{name} {newest[name]:.4f}" for name in sorted(newest))


def predictions_text(figures: job_pb2.ScoreFigures) -> str:
    """Return figures of predictions, such as ``auc 0.7812  logloss 0.4410``; empty: none."""
    known = score_figures(figures)
    return "  ".join(f"{name} {known[name]:.4f}" for name in SCORES if known[name] is not None)


def progressive_text(status: job_pb2.JobStatus) -> str:
    """Return the decayed figures of predictions before training; empty: there are none."""
    told = status.progressive
    if not status.HasField("progressive"):
        return ""
    skipped = f", {told.skipped:,} skipped" if told.skipped else ""
    figures = predictions_text(told.decayed)
    return f"{figures or '-'}  ({told.examples:,} records{skipped})"


def summary_lines(status: job_pb2.JobStatus) -> list[str]:
    """Return what a job has come to, for people."""
    loss = f", loss {status.loss:.4f}" if status.HasField("loss") else ""
    lines = [
        f"{status.job}: {status.state}{f' ({status.reason})' if status.reason else ''}",
        _work_text(status) + loss,
    ]
    metrics = metrics_text(status)
    if metrics:
        lines.append(metrics)
    if progressive := progressive_text(status):
        lines.append(f"before training: {progressive}")
    lines += [f"alert: {alert}" for alert in status.progressive.alerts]
    if status.went_back:
        times = "once" if status.went_back == 1 else f"{status.went_back:,} times"
        lines.append(f"the job went back {times} to a checkpoint, and trained again from there")
    if status.inexact:
        lines.append(_inexact_text(status))
    if status.checkpoints_failed:
        lines.append(f"{status.checkpoints_failed:,} checkpoints could not be written")
    if status.bad_records:
        lines.append(f"{status.bad_records:,} damaged records were skipped")
    if status.stream.dropped_records:
        lines.append(_dropped_text(status))
    if status.dead_letters:
        lines.append(
            f"{status.dead_letters:,} tasks failed too often; see `backstay jobs show {status.job}`"
        )
    return lines


def _work_text(status: job_pb2.JobStatus) -> str:
    """Return how much was done; a job that trains nothing has no steps."""
    done = {"evaluation": "evaluated", "prediction": "predicted"}.get(kind_name(status.kind))
    if status.passes or status.steps or done is None:
        return f"{status.examples:,} examples in {status.steps:,} steps"
    return f"{status.examples:,} records {done}"


def figures_text(status: job_pb2.JobStatus, servers: str) -> list[tuple[str, str]]:
    """Return the names and values that a running job is shown with."""
    alive = sum(worker.alive for worker in status.workers)
    figures = [
        ("examples", f"{status.examples:,}  ({status.examples_per_s:,.0f}/s)"),
        ("loss", f"{status.loss:.4f}" if status.HasField("loss") else "-"),
        ("workers", f"{alive}/{status.workers_desired}"),
        ("pservers", servers),
    ]
    if status.stream.HasField("lag_records"):
        figures.append(("lag", lag_text(status.stream)))
    if status.HasField("staleness"):
        figures.append(("staleness", f"{status.staleness:.1f}"))
    if progressive := progressive_text(status):
        figures.append(("before training", progressive))
    metrics = metrics_text(status)
    if metrics:
        figures.append(("metrics", metrics))
    if status.dead_letters or status.bad_records:
        figures.append(
            ("dead letters", f"{status.dead_letters} tasks, {status.bad_records} damaged records")
        )
    return figures


def lag_text(told: job_pb2.StreamStatus) -> str:
    """Return how far a job is behind data without an end, as far as it is known."""
    texts = []
    if told.HasField("lag_records"):
        texts.append(f"{told.lag_records:,} records")
    if told.HasField("lag_s"):
        texts.append(f"{told.lag_s:,.0f} s")
    if told.waiting_folders:
        texts.append(f"{told.waiting_folders:,} folders to count")
    return ", ".join(texts)


def _dropped_text(status: job_pb2.JobStatus) -> str:
    dropped = status.stream.dropped_records
    return f"the source has dropped {dropped:,} records before they were taken"


def _inexact_text(status: job_pb2.JobStatus) -> str:
    return f"records may count never or twice {status.inexact}"


def notes_text(status: job_pb2.JobStatus, trouble: str) -> str:
    """Return what is to be said of a job beside its figures; empty: nothing."""
    inexact = _inexact_text(status) if status.inexact else ""
    alerts = [f"alert: {alert}" for alert in status.progressive.alerts]
    dropped = _dropped_text(status) if status.stream.dropped_records else ""
    stops = f"stops when what it has taken is done: {status.stream.stopping}"
    stops = stops if status.stream.stopping else ""
    return "; ".join(filter(None, [trouble or status.trouble, stops, dropped, inexact, *alerts]))
