"""docs/reference/job-file.md tells every field of a job, with its default and what is allowed."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from backstay.job_spec import (
    AlertSpec,
    AutoscaleSpec,
    CheckpointSpec,
    DataSpec,
    EarlyStop,
    ExportsSpec,
    ExportTopicSpec,
    HooksSpec,
    JobSpec,
    LifetimeSpec,
    ModeSpec,
    PeriodSpec,
    ProgressiveSpec,
    ServersSpec,
    WorkersSpec,
)
from backstay.kubernetes.spec import KubernetesSpec, MoreMemorySpec, PodSpec, ScheduleSpec
from backstay.settings import nested_kind

PAGE_PATH = Path(__file__).resolve().parents[2] / "docs" / "reference" / "job-file.md"
PAGE = PAGE_PATH.read_text(encoding="utf-8") if PAGE_PATH.exists() else ""
# (heading, what it tells, what stands before the names)
SECTIONS: list[tuple[str, type, str]] = [
    ("## The job", JobSpec, ""),
    ("## Data", DataSpec, "training."),
    ("## Periods", PeriodSpec, "period."),
    ("## Mode", ModeSpec, "mode."),
    ("## Early stop", EarlyStop, "early_stop."),
    ("## Progressive metrics", ProgressiveSpec, "progressive."),
    ("## Alerts", AlertSpec, "alerts."),
    ("## Checkpoints", CheckpointSpec, "checkpoint."),
    ("## Lifetime of rows", LifetimeSpec, "lifetime."),
    ("## Exports", ExportsSpec, "exports."),
    ("## The topic of an export", ExportTopicSpec, "exports.topic."),
    ("## Workers", WorkersSpec, "workers."),
    ("## Servers", ServersSpec, "servers."),
    ("## Autoscaling", AutoscaleSpec, "autoscale."),
    ("## Kubernetes", KubernetesSpec, "kubernetes."),
    ("## Pods", PodSpec, "kubernetes.worker."),
    ("## More memory", MoreMemorySpec, "kubernetes.more_memory."),
    ("## Schedule", ScheduleSpec, "schedule."),
    ("## Hooks", HooksSpec, "hooks."),
]


def default_of(item: Field[Any]) -> str:
    """The default as the table shows it."""
    if item.default is item.default_factory is MISSING:
        return "needed"
    value = item.default
    if value is MISSING or value is None or value == ():
        return "none" if value is not MISSING else "empty" if item.default_factory is dict else ""
    if value == "":
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def row_of(prefix: str, item: Field[Any]) -> str:
    """The line of the table that a field must have, as the field says it."""
    low, high = item.metadata["minimum"], item.metadata["maximum"]
    # No job comes near the largest ones: they are what 64 bits hold.
    open_end = high is None or high >= 2**31 - 1
    allowed = "" if low is None else f"{low} or more" if open_end else f"{low} to {high}"
    allowed = ", ".join(f"`{one}`" for one in item.metadata["choices"]) or allowed
    fixed = " *" if item.metadata["fixed"] else ""
    doc = item.metadata["doc"]
    return f"| `{prefix}{item.name}`{fixed} | {default_of(item)} | {allowed} | {doc} |"


def section(heading: str) -> str:
    return PAGE.partition(f"\n{heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(("heading", "kind", "prefix"), SECTIONS, ids=lambda one: str(one))
def test_every_field_has_its_row_in_its_place(heading: str, kind: type, prefix: str) -> None:
    rows = [line for line in section(heading).splitlines() if line.startswith("| `")]
    assert rows == [row_of(prefix, item) for item in fields(kind)]


def test_every_nested_field_has_a_section() -> None:
    kinds = (JobSpec, KubernetesSpec, ExportsSpec)
    nested = {nested_kind(kind, item.name) for kind in kinds for item in fields(kind)} - {None}
    assert nested == {kind for _, kind, _ in SECTIONS} - {JobSpec}


def test_the_examples_of_the_page_are_jobs() -> None:
    examples = PAGE.split("```yaml\n")[1:]
    assert examples
    for example in examples:
        JobSpec.from_mapping(yaml.safe_load(example.partition("```")[0]))
