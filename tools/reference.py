"""Tables of the reference, made of the code that they describe. MkDocs calls it for each build.

A page of docs/reference that says ``render_macros: true`` calls these functions in double braces.
What a row says stands beside the thing itself: in the declaration of a setting, in the docstring
of an error, in the help of a metric. May import every package; writes nothing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from prometheus_client.metrics_core import Metric

from backstay import _native, errors
from backstay._proto.v1 import job_pb2
from backstay.consensus import ClusterSnapshot, NodeRecord
from backstay.exit_codes import ExitCode
from backstay.job_spec import AlertSpec, DataSpec, JobSpec, ProgressiveSpec
from backstay.master import prometheus
from backstay.pserver.metrics import families
from backstay.pserver.metrics.figures import ControlFigures

# Above it a bound is what 64 bits hold, and no reader needs it.
OPEN_END = 2**31 - 1
SETTINGS_HEAD = "| setting | default | allowed | what it does |"
JOB_HEAD = "| field | default | allowed | what it does |"
ERRORS_HEAD = "| error | retry safe | meaning and remedy |"
CODES_HEAD = "| exit code | meaning |"
METRICS_HEAD = "| metric | type | labels | meaning |"


def define_env(env: Any) -> None:
    """Give the functions to MkDocs."""
    for function in (settings, job_fields, error_table, exit_codes, node_metrics, job_metrics):
        env.macro(function)


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table.

    Raises:
        ValueError: It has no row: the page asks for what is not there.
    """
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        raise ValueError(f"no rows under {head}")
    return "\n".join([head, "|" + " --- |" * (head.count("|") - 1), *lines])


def settings(kind: str, first: str = "", last: str = "") -> str:
    """Return the settings of a configuration, in their order.

    Args:
        kind: Module and name of its class, such as ``backstay.config.ServerConfig``.
        first: The first one; empty: the first of the class.
        last: The last one; empty: the last of the class.
    """
    chosen = _between(fields(_class_of(kind)), first, last)
    return table(SETTINGS_HEAD, ([f"`{item.name}`", *_what_is_said(item)] for item in chosen))


def job_fields(kind: str, prefix: str = "") -> str:
    """Return the fields of a section of the job file; a star marks one that is fixed.

    Args:
        kind: Module and name of the section's class.
        prefix: What stands before the names.
    """
    rows = (
        [f"`{prefix}{item.name}`{' *' if item.metadata['fixed'] else ''}", *_what_is_said(item)]
        for item in fields(_class_of(kind))
    )
    return table(JOB_HEAD, rows)


def error_table(*names: str, below: bool = True) -> str:
    """Return some errors, each with those that derive from it.

    Args:
        names: Of the errors, in their order.
        below: Whether those that derive from them follow.
    """
    rows: list[list[str]] = []
    for name in names:
        first = getattr(errors, name)
        found = list(_tree(first)) if below else [first]
        rows += [_error_row(error, is_first=error is first) for error in found]
    return table(ERRORS_HEAD, rows)


def exit_codes() -> str:
    """Return all exit codes of the programs."""
    return table(CODES_HEAD, ([str(int(code)), code.meaning] for code in ExitCode))


def node_metrics(*groups: str) -> str:
    """Return metrics of a node: those that some functions of ``families`` make."""
    made = node_groups()
    return table(METRICS_HEAD, (_metric_row(one) for name in groups for one in made[name]))


def job_metrics(*groups: str) -> str:
    """Return metrics of a job: those that some functions of ``master.prometheus`` make."""
    made = job_groups()
    return table(
        METRICS_HEAD,
        (_metric_row(one, hidden="job") for name in groups for one in made[name]),
    )


def _class_of(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)


def _between(items: Sequence[Field[Any]], first: str, last: str) -> Sequence[Field[Any]]:
    names = [item.name for item in items]
    begin = names.index(first) if first else 0
    end = names.index(last) + 1 if last else len(names)
    return items[begin:end]


def _what_is_said(item: Field[Any]) -> tuple[str, str, str]:
    return _default_of(item), _allowed(item), item.metadata["doc"]


def _default_of(item: Field[Any]) -> str:
    if item.default is MISSING and item.default_factory is MISSING:
        return "needed"
    if item.default is MISSING:
        return "empty" if item.default_factory is dict else ""
    if item.default is None or item.default == ():
        return "none"
    if item.default == "":
        return "empty"
    text = str(item.default)
    return f"`{text.lower() if isinstance(item.default, bool) else text}`"


def _allowed(item: Field[Any]) -> str:
    if item.metadata["choices"]:
        return ", ".join(f"`{choice}`" for choice in item.metadata["choices"])
    low, high = item.metadata["minimum"], item.metadata["maximum"]
    if low is None:
        return ""
    return f"{low} or more" if high is None or high >= OPEN_END else f"{low} to {high}"


def _tree(error: type[BaseException]) -> Iterator[type[BaseException]]:
    yield error
    for child in error.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _tree(child)


def _error_row(error: Any, *, is_first: bool) -> list[str]:
    text = _paragraph(inspect.getdoc(error) or "")
    bases = [base for base in error.__bases__ if base.__module__ == "builtins"]
    parents = [base for base in error.__bases__ if base.__module__ == errors.__name__]
    notes = [f"a `{parent.__name__}`" for parent in parents if not is_first]
    notes += [f"a `{base.__name__}`" for base in bases if base is not Exception]
    safe = "yes" if error.retry_safe else "no"
    return [f"`{error.__name__}`", safe, text + (f" ({', '.join(notes)})" if notes else "")]


def _paragraph(text: str) -> str:
    """Return a docstring but its sections as one line, with Markdown's quotes."""
    prose = text.partition("\nAttributes:")[0]
    return " ".join(prose.split()).replace("``", "`").replace("|", "\\|")


def _metric_row(family: Metric, hidden: str = "") -> list[str]:
    name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
    labels = [f"`{one}`" for one in _labels_of(family) if one != hidden]
    return [f"`{name}`", family.type, ", ".join(labels), family.documentation]


def _labels_of(family: Metric) -> list[str]:
    named = list(getattr(family, "_labelnames", ()))
    used = [name for sample in family.samples for name in sample.labels if name != "le"]
    return list(dict.fromkeys(named or used))


def node_groups() -> dict[str, list[Metric]]:
    """Return each group of a node's metrics, as an idle node of one slot has them."""
    server = _native.DataServer(
        listen="127.0.0.1:0", cluster_id="reference", node_id="ps-0", instance=1, slot_count=1
    )
    try:
        own = NodeRecord("ps-0", "h:1", "h:2", 1, "serving", "h")
        sources = families.NodeSources(
            cluster="reference",
            memory_limit_bytes=0,
            own=lambda: own,
            snapshot=ClusterSnapshot,
            stats=server.stats_json,
            tables=server.tables_json,
            figures=ControlFigures(),
        )
        return families.groups(sources)
    finally:
        server.stop(grace_ms=0)


def job_groups() -> dict[str, list[Metric]]:
    """Return each group of a job's metrics, as a job that has them all begins."""
    spec = JobSpec(
        name="reference",
        model="model.py",
        training=DataSpec(paths=("a.csv",)),
        progressive=ProgressiveSpec(),
        alerts=(AlertSpec(metric="auc", below=0.5),),
    )
    status = job_pb2.JobStatus(state="running")
    status.stream.SetInParent()
    return prometheus.groups(status, spec)
