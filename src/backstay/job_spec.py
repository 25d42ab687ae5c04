"""What a training job is: its data, model, mode and limits, checked when it is made.

A ``JobSpec`` that exists is a valid one. It goes from the job file to the job's record and to each
worker as JSON. ``docs/reference/job-file.md`` lists every field.

Imports ``backstay.nested_settings``, ``backstay.settings``, ``backstay.profiles`` and
``backstay.errors`` only; reads nothing and does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from backstay.errors import ConfigError
from backstay.nested_settings import check_entries, entry, from_mapping, nested_kind, to_mapping
from backstay.profiles import PROFILES
from backstay.settings import check_name

__all__ = [
    "CheckpointSpec",
    "DataSpec",
    "EarlyStop",
    "HooksSpec",
    "JobSpec",
    "ModeSpec",
    "ServersSpec",
    "WorkersSpec",
]

DATA_KINDS = ("auto", "csv", "tsv", "parquet", "arrow", "recordio", "jsonl", "sql", "custom")
FRAMEWORKS = ("auto", "paddle", "torch")
SHUFFLES = ("tasks_and_records", "tasks", "none")
MODES = ("async", "sync", "bounded", "geo")
LAUNCHERS = ("local",)
WORKERS_MAX = 10_000
SERVERS_MAX = 64
# Servers of its own that a job has if nothing says how many.
LOCAL_SERVERS = 3
# A record of the coordination store; a job file that needs more has its data in the wrong place.
SPEC_BYTES_MAX = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Where records come from."""

    SHORT: ClassVar[str] = "paths"

    kind: str = entry(
        "auto", "The format; auto goes by the ending of the first file.", choices=DATA_KINDS
    )
    paths: tuple[str, ...] = entry(
        (), "Files, folders, patterns with `*` or URLs; for sql, tables or queries."
    )
    options: Mapping[str, Any] = entry(dict, "Options of the reader of this kind.")

    def __post_init__(self) -> None:
        """Check the values."""
        check_entries(self)
        if not self.paths and self.kind != "custom":
            raise ConfigError("paths: no data is named; give at least one file, folder or URL")


@dataclass(frozen=True, kw_only=True)
class ModeSpec:
    """How workers keep step with each other."""

    SHORT: ClassVar[str] = "kind"

    kind: str = entry(
        "async",
        "async: no worker waits; sync: all workers compute one step together; bounded: no worker "
        "is more than `staleness` steps ahead; geo: `local_steps` steps alone, then their sum is "
        "sent.",
        choices=MODES,
    )
    steps_in_flight: int = entry(
        1,
        "async: steps whose pushes may be under way when the next one begins.",
        minimum=0,
        maximum=64,
    )
    staleness: int = entry(
        4, "bounded: most steps that a worker may be ahead of the slowest.", minimum=1, maximum=1024
    )
    local_steps: int = entry(8, "geo: steps between two exchanges.", minimum=1, maximum=65_536)

    def __post_init__(self) -> None:
        """Check the values."""
        check_entries(self)


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """When to stop before the last pass: a metric of the evaluation no longer gets better."""

    metric: str = entry(..., "Name of the metric, as the model file's `eval_metrics` has it.")
    mode: str = entry("max", "Whether more is better (max) or less (min).", choices=("max", "min"))
    patience: int = entry(
        1,
        "Evaluations in a row without a better value after which it stops.",
        minimum=1,
        maximum=1_000_000,
    )
    min_delta: float = entry(0.0, "By how much a value must be better to count.", minimum=0.0)

    def __post_init__(self) -> None:
        """Check the values."""
        check_entries(self)
        if not self.metric:
            raise ConfigError("metric: is empty; name a metric of the model file's eval_metrics")


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """When the job has the servers save model and progress together."""

    SHORT: ClassVar[str] = "every"

    every: str = entry("pass", "Save at the end of each pass, or never.", choices=("pass", "none"))
    every_tasks: int = entry(
        0, "Save also after this many tasks. 0: no.", minimum=0, maximum=2**31 - 1
    )
    url: str = entry(
        "",
        "Where local servers keep checkpoints: a folder or URL. Empty: `checkpoints` in "
        "`log_dir`. A running cluster has its own setting, `checkpoint_url`.",
    )

    stop_wait_s: int = entry(
        120,
        "How long a stopped job (Ctrl-C, SIGTERM, `backstay jobs stop`) may take to save, "
        "if servers of its own end with it. 0: it does not save.",
        minimum=0,
        maximum=86_400,
    )
    unsaved_wait_s: int = entry(
        86_400,
        "How long a finished job keeps servers of its own and tries to write its last "
        "checkpoint, before it ends as `unsaved`.",
        minimum=0,
        maximum=2**31 - 1,
    )

    @property
    def is_wanted(self) -> bool:
        """Whether the job saves at all, and so also its end."""
        return self.every != "none" or self.every_tasks > 0

    def __post_init__(self) -> None:
        """Check the values."""
        check_entries(self)


@dataclass(frozen=True, kw_only=True)
class WorkersSpec:
    """How many workers, and what happens when they end."""

    SHORT: ClassVar[str] = "initial"

    initial: int = entry(2, "Workers to begin with.", minimum=0, maximum=WORKERS_MAX)
    min: int = entry(1, "Least that `jobs scale` accepts.", minimum=0, maximum=WORKERS_MAX)
    max: int = entry(WORKERS_MAX, "Most that `jobs scale` accepts.", minimum=1, maximum=WORKERS_MAX)
    max_relaunches: int = entry(
        10,
        "How often in a row a worker that failed is replaced; one that was killed always is.",
        minimum=0,
        maximum=1_000_000,
    )
    env: Mapping[str, str] = entry(dict, "Additional environment variables of the workers.")

    def __post_init__(self) -> None:
        """Check the values."""
        check_entries(self)
        if not self.min <= self.initial <= self.max:
            raise ConfigError(
                f"initial: {self.initial} is not between min ({self.min}) and max ({self.max})"
            )


@dataclass(frozen=True, kw_only=True)
class ServersSpec:
    """The parameter servers: those of a cluster that runs, or some for this job alone."""

    local: int = entry(
        0, "Servers to start on this machine, for this job.", minimum=0, maximum=SERVERS_MAX
    )
    endpoints: tuple[str, ...] = entry(
        (),
        "Control addresses (`host:port`) of a running cluster. With neither this nor "
        "`local`, those in BACKSTAY_ENDPOINT, else 3 local servers.",
    )
    replicas: int = entry(2, "Local servers: copies of each slot.", minimum=1, maximum=3)
    settings: Mapping[str, Any] = entry(dict, "Local servers: other settings of `pserver serve`.")

    def __post_init__(self) -> None:
        """Check the values."""
        check_entries(self)
        if self.local and self.endpoints:
            raise ConfigError("endpoints: given together with local; leave one of them out")


@dataclass(frozen=True, kw_only=True)
class HooksSpec:
    """Commands run on this machine by ``/bin/sh`` around the job."""

    before: tuple[str, ...] = entry(
        (), "Commands run in turn before the job; if one fails, the job fails."
    )
    after: tuple[str, ...] = entry(
        (), "Commands run in turn after the job, however it ended; BACKSTAY_JOB_RESULT says how."
    )
    timeout_s: int = entry(3600, "Most that one command may take.", minimum=1, maximum=7 * 86_400)

    def __post_init__(self) -> None:
        """Check the values."""
        check_entries(self)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job.

    Example:
        >>> spec = JobSpec(name="census", model="model.py", training=DataSpec(paths=("a.csv",)))
        >>> JobSpec.from_json(spec.to_json()) == spec
        True
    """

    name: str = entry(..., "Name of the job; two jobs of one name are one job.", fixed=True)
    profile: str = entry(
        "none",
        "How long the job runs: it decides servers.replicas and checkpoint.every where they are "
        "not set.",
        choices=("none", *PROFILES),
    )
    model: str = entry(..., "Path of the Python file that defines the model.", fixed=True)
    model_params: Mapping[str, Any] = entry(
        dict, "Arguments of the file's `custom_model`.", fixed=True
    )
    callback_params: Mapping[str, Any] = entry(dict, "Arguments of the file's `callbacks`.")
    model_from: str = entry(
        "",
        "Work with the tables of the job of this name, to evaluate or predict with what it "
        "learned. Empty: its own.",
        fixed=True,
    )
    framework: str = entry(
        "auto", "auto goes by what `custom_model` returns.", choices=FRAMEWORKS, fixed=True
    )
    training: DataSpec | None = entry(None, "Records to train on.", fixed=True)
    validation: DataSpec | None = entry(None, "Records to evaluate on.", fixed=True)
    prediction: DataSpec | None = entry(None, "Records to predict for.", fixed=True)
    epochs: int = entry(1, "Passes over the training data.", minimum=1, maximum=1_000_000)
    batch_size: int = entry(
        64, "Records in a batch of one worker.", minimum=1, maximum=1 << 24, fixed=True
    )
    records_per_task: int = entry(
        4096,
        "Records in a task, the unit of work.",
        minimum=1,
        maximum=1 << 31,
        fixed=True,
    )
    shuffle: str = entry(
        "tasks_and_records",
        "What is put in a new order for each pass.",
        choices=SHUFFLES,
        fixed=True,
    )
    seed: int = entry(0, "Seed of all orders.", minimum=0, maximum=2**63 - 1, fixed=True)
    mode: ModeSpec = entry(ModeSpec, "How workers keep step.", fixed=True)
    max_steps: int = entry(
        0, "Stop after this many batches of all workers. 0: no limit.", minimum=0, maximum=2**62
    )
    evaluation_every_steps: int = entry(
        0,
        "Batches between two evaluations. 0: evaluate after each pass.",
        minimum=0,
        maximum=2**62,
    )
    early_stop: EarlyStop | None = entry(None, "When to stop before the last pass.")
    max_task_retries: int = entry(
        3,
        "How often a failing task is tried again before it is dead-lettered.",
        minimum=0,
        maximum=1000,
    )
    max_bad_records: int = entry(
        0,
        "Most damaged records that one pass over the data may skip; one more fails the job."
        " Validation data has the same limit for itself.",
        minimum=0,
        maximum=2**62,
    )
    checkpoint: CheckpointSpec = entry(CheckpointSpec, "When model and progress are saved.")
    task_lease_ttl_ms: int = entry(
        2000,
        "How long a worker may be silent before its tasks go to others; "
        "with N workers at least N / 250 s.",
        minimum=200,
        maximum=600_000,
    )
    straggler_factor: float = entry(
        3.0,
        "A task that takes this many times as long as the others gets a speculative attempt.",
        minimum=1.0,
    )
    straggler_min_s: float = entry(
        30.0, "Time that a task must have taken before it gets a speculative attempt.", minimum=0.0
    )
    step_limit_s: float = entry(
        30.0,
        "sync, bounded: how long other workers wait for a worker's step. At least "
        "`straggler_factor` times a usual step; four times as long for the first step of a "
        "leader (sync) or of any worker (bounded).",
        minimum=0.1,
        maximum=86_400.0,
    )
    audit: bool = entry(
        False,
        "Count each record of a pass in a table of the servers; `jobs audit` reads it.",
        fixed=True,
    )
    output: str = entry("", "Folder or URL for predictions and exported models.")
    workers: WorkersSpec = entry(WorkersSpec, "How many workers.")
    launcher: str = entry(
        "local",
        "What starts the workers. local: the command that runs the job, on its own machine.",
        choices=LAUNCHERS,
    )
    servers: ServersSpec = entry(ServersSpec, "The parameter servers.")
    hooks: HooksSpec = entry(HooksSpec, "Commands before and after the job.")
    log_dir: str = entry("", "Folder for logs and metrics. Empty: `backstay-jobs/NAME`.")
    tensorboard: bool = entry(False, "Write TensorBoard event files to `log_dir` as well.")
    swap_embeddings_over_bytes: int = entry(
        2 * 1024 * 1024,
        "Embedding layers larger than this are kept on the servers.",
        minimum=0,
        maximum=2**62,
        fixed=True,
    )

    def __post_init__(self) -> None:
        """Check the values, each alone and then together."""
        check_entries(self)
        check_name("name", self.name)
        if self.model_from:
            check_name("model_from", self.model_from)
        if not self.model.endswith(".py"):
            raise ConfigError(f"model: {self.model!r} is not the path of a .py file")
        if self.training is self.validation is self.prediction is None:
            raise ConfigError("training: no data is named; give training, validation or prediction")
        if self.prediction is not None and (self.training or self.validation):
            raise ConfigError("prediction: is a job of its own; leave out training and validation")
        for name in ("early_stop", "evaluation_every_steps"):
            if getattr(self, name) and (self.training is None or self.validation is None):
                raise ConfigError(f"{name}: needs both training and validation data")
        if len(self.to_json().encode()) > SPEC_BYTES_MAX:
            raise ConfigError(
                f"name: the job {self.name!r} takes more than {SPEC_BYTES_MAX} bytes as JSON; "
                "name folders or patterns instead of single files"
            )

    @property
    def kind(self) -> str:
        """What it does: ``training`` (also with evaluation), ``evaluation`` or ``prediction``."""
        if self.training is not None:
            return "training"
        return "evaluation" if self.prediction is None else "prediction"

    @property
    def data(self) -> dict[str, DataSpec]:
        """The data that it has, by the names of the fields."""
        found = (
            ("training", self.training),
            ("validation", self.validation),
            ("prediction", self.prediction),
        )
        return {name: data for name, data in found if data is not None}

    @classmethod
    def from_mapping(cls, document: Mapping[str, Any]) -> JobSpec:
        """Return the job that a mapping of plain values describes.

        Raises:
            ConfigError: A field is unknown, missing or wrong; the message begins with its dotted
                name, for example ``training.kind``.
        """
        return from_mapping(cls, _with_profile(document))

    def to_mapping(self) -> dict[str, Any]:
        """Return it as plain values; ``from_mapping`` makes it again."""
        return to_mapping(self)

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """Return the job that ``to_json`` wrote.

        Raises:
            ConfigError: It is not JSON, or a field is unknown, missing or wrong.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the job is not JSON: {error}") from error
        return from_mapping(cls, document, short=False)

    def to_json(self) -> str:
        """Return it as JSON, the same text for equal jobs."""
        return json.dumps(to_mapping(self), sort_keys=True, allow_nan=False)

    def fixed_differences(self, other: JobSpec) -> tuple[str, ...]:
        """Return the fields that differ and that a job which has begun cannot change."""
        return tuple(
            item.name
            for item in fields(self)
            if item.metadata["fixed"] and getattr(self, item.name) != getattr(other, item.name)
        )


def _with_profile(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a document with what its profile decides, where it does not say it itself."""
    profile = PROFILES.get(str(document.get("profile", "")))
    if profile is None:
        return document
    filled = dict(document)
    servers = document.get("servers")
    local = servers.get("local") if isinstance(servers, Mapping) else None
    count = local if type(local) is int and local > 0 else LOCAL_SERVERS
    for (outer, inner), value in profile.job_settings(count).items():
        part = filled.get(outer, {})
        if not isinstance(part, Mapping):
            short = getattr(nested_kind(JobSpec, outer), "SHORT", None)
            part = {short: part} if short else None
        if part is not None:
            filled[outer] = {inner: value, **part}
    return filled
