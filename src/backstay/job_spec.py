"""What a training job is: its data, model, mode and limits, checked when it is made.

A ``JobSpec`` that exists is a valid one. It goes from the job file to the job's record and to each
worker as JSON. ``docs/reference/job-file.md`` lists every field.

Imports ``backstay.settings``, ``backstay.kubernetes.spec``, ``backstay.profiles``,
``backstay.addresses`` and ``backstay.errors`` only; does no I/O.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

from backstay.addresses import split_address
from backstay.errors import ConfigError
from backstay.kubernetes.spec import KubernetesSpec, ScheduleSpec
from backstay.profiles import PROFILES
from backstay.settings import (
    check,
    check_name,
    from_mapping,
    nested_kind,
    setting,
    to_mapping,
)

__all__ = [
    "AlertSpec",
    "AutoscaleSpec",
    "CheckpointSpec",
    "DataSpec",
    "EarlyStop",
    "ExportTopicSpec",
    "ExportsSpec",
    "HooksSpec",
    "JobSpec",
    "LifetimeSpec",
    "ModeSpec",
    "PeriodSpec",
    "ProgressiveSpec",
    "ServerCounts",
    "ServersSpec",
    "WorkersSpec",
]

_TEXT_MAX = 1_000
_KAFKA_SETTINGS_MAX = 100
_TOPIC = re.compile(r"[A-Za-z0-9_.-]{1,249}", re.ASCII)
# Everyone who may look at the cluster sees the record.
_SECRET = re.compile(r"password|secret|\.pem$|oauthbearer\.config$", re.ASCII)
# Another value would lose rows, or have two write at once.
_OURS = frozenset(
    {
        "acks",
        "auto.offset.reset",
        "bootstrap.servers",
        "enable.auto.commit",
        "enable.idempotence",
        "enable.partition.eof",
        "isolation.level",
        "metadata.broker.list",
        "request.required.acks",
        "transactional.id",
    }
)

DATA_KINDS = (
    *("auto", "csv", "tsv", "parquet", "arrow", "recordio", "jsonl"),
    *("sql", "kafka", "custom"),
)
# Options of data without an end that say how they are reached, and nothing of their records.
ACCESS_OPTIONS = ("brokers", "group", "look_s", "settings", "settings_file", "storage", "timeout_s")
# Kinds of training data that may have no end.
STREAM_KINDS = ("kafka", "csv", "tsv", "parquet", "arrow", "recordio", "jsonl")
# Options that only such data have, by kind; files have those of closed folders.
_TOPIC_OPTIONS = ("group",)
_FOLDER_OPTIONS = ("marker", "done_list", "start", "look_s")
FRAMEWORKS = ("auto", "paddle", "torch")
SHUFFLES = ("tasks_and_records", "tasks", "none")
MODES = ("async", "sync", "bounded", "geo")


class LauncherClasses(NamedTuple):
    """The classes of a launcher as ``module:Class``, which are imported when a job asks for them.

    Attributes:
        workers: Starts and ends the workers: a ``backstay.master.launcher.Launcher``.
        place: Runs whole jobs (``--on NAME``): a ``backstay.runner.place.Place``. Empty: the jobs
            run on the command's machine.
    """

    workers: str
    place: str = ""


LAUNCHERS = {
    "local": LauncherClasses("backstay.master.local_launcher:LocalLauncher"),
    "kubernetes": LauncherClasses(
        "backstay.kubernetes.pod_launcher:PodLauncher", "backstay.kubernetes.place:KubernetesPlace"
    ),
}
WORKERS_MAX = 10_000
SERVERS_MAX = 64
WORKER_RULES = ("fixed", "fill", "throughput")
SERVER_RULES = ("fixed", "load")
PREDICTIONS = ("auto", "probabilities", "logits")
ALERT_METRICS = ("auc", "logloss", "calibration", "examples", "skipped")
ALERTS_MAX = 32
# Servers of its own that a job has if nothing says how many.
LOCAL_SERVERS = 3
# A record of the coordination store; a job file that needs more has its data in the wrong place.
SPEC_BYTES_MAX = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Where records come from."""

    SHORT: ClassVar[str] = "paths"

    kind: str = setting("auto", "auto goes by the first file's ending.", choices=DATA_KINDS)
    paths: tuple[str, ...] = setting(
        (), "Files, folders, patterns or URLs; for sql, tables or queries; for kafka, topics."
    )
    options: Mapping[str, Any] = setting(dict, "Options of this kind's reader.")

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if not self.paths and self.kind != "custom":
            raise ConfigError("paths: no data is named; give at least one file, folder or URL")


@dataclass(frozen=True, kw_only=True)
class ModeSpec:
    """How workers keep step with each other."""

    SHORT: ClassVar[str] = "kind"

    kind: str = setting(
        "async",
        "How workers keep step.",
        choices=MODES,
    )
    steps_in_flight: int = setting(
        1,
        "async: steps whose pushes may be under way when the next begins.",
        minimum=0,
        maximum=64,
    )
    staleness: int = setting(
        4, "bounded: most steps ahead of the slowest worker.", minimum=1, maximum=1024
    )
    compensation: str = setting(
        "ignore",
        "async, bounded: what servers do about stale gradients: nothing, or divide the learning "
        "rate by their staleness (scale).",
        choices=("ignore", "scale"),
    )
    local_steps: int = setting(8, "geo: steps between two exchanges.", minimum=1, maximum=65_536)

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if self.compensation != "ignore" and self.kind not in ("async", "bounded"):
            raise ConfigError(
                f"compensation: {self.compensation} is for kind async or bounded, not {self.kind}: "
                "remove it, or choose one of these"
            )


@dataclass(frozen=True, kw_only=True)
class PeriodSpec:
    """The periods of training data that never end: what stands in the place of passes."""

    records: int = setting(
        0, "A period ends with so many records. 0: records do not end it.", minimum=0, maximum=2**62
    )
    folders: int = setting(
        0,
        "Folders: a period ends with so many of them. 0: folders do not end it.",
        minimum=0,
        maximum=1_000_000,
    )
    seconds: float = setting(
        0.0,
        "A period ends so long after its first record was taken. 0: time does not end it.",
        minimum=0.0,
        maximum=366 * 86_400.0,
    )
    ahead_records: int = setting(
        1_000_000,
        "Most records that are taken and not yet done; at least `records_per_task`.",
        minimum=1,
        maximum=2**62,
    )
    linger_s: float = setting(
        5.0,
        "Records too few for a whole task become a short one after so long.",
        minimum=0.0,
        maximum=86_400.0,
    )

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if not (self.records or self.seconds or self.folders):
            raise ConfigError("records: give records, seconds or folders, else no period ends")


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """When to stop before the last pass: a metric of the evaluation no longer gets better."""

    metric: str = setting(..., "Name of the metric in the model file's `eval_metrics`.")
    mode: str = setting(
        "max", "Whether more is better (max) or less (min).", choices=("max", "min")
    )
    patience: int = setting(
        1,
        "Stop after so many evaluations in a row without a better value.",
        minimum=1,
        maximum=1_000_000,
    )
    min_delta: float = setting(0.0, "How much better a value must be to count.", minimum=0.0)

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if not self.metric:
            raise ConfigError("metric: is empty; name a metric of the model file's eval_metrics")


@dataclass(frozen=True, kw_only=True)
class ProgressiveSpec:
    """Metrics of what the model predicts for each training batch before it is trained on it."""

    SHORT: ClassVar[str] = "window_examples"

    window_examples: int = setting(
        100_000,
        "A window ends with the task that brings so many records. 0: only `window_s` ends it.",
        minimum=0,
        maximum=2**62,
    )
    window_s: float = setting(
        0.0, "It also ends after this time. 0: no limit.", minimum=0.0, maximum=31_536_000.0
    )
    half_life_examples: int = setting(
        1_000_000,
        "In the decayed figures a record counts half after so many more. 0: all count the same.",
        minimum=0,
        maximum=2**62,
    )
    predictions: str = setting(
        "auto",
        "What the model answers; auto goes by `logloss` or `logloss_of_logits` in the model file's "
        "`eval_metrics`.",
        choices=PREDICTIONS,
    )
    by: str = setting("", "Column of the data: each of its values gets figures, too. Empty: none.")
    by_values_max: int = setting(
        16,
        "The first so many values get figures of their own, the others together, as `other`.",
        minimum=1,
        maximum=32,
    )

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if not self.window_examples and not self.window_s:
            raise ConfigError("window_examples: is 0, and so is window_s: no window would end")


@dataclass(frozen=True, kw_only=True)
class AlertSpec:
    """A figure of `progressive` that is watched."""

    metric: str = setting(..., "Which figure.", choices=ALERT_METRICS)
    below: float | None = setting(None, "It is bad if it is less than this.")
    above: float | None = setting(None, "It is bad if it is more than this.")
    over: str = setting(
        "window", "Of the window that has ended, or decayed.", choices=("window", "decayed")
    )
    for_windows: int = setting(
        1, "How many windows in a row it must be bad.", minimum=1, maximum=1_000_000
    )
    action: str = setting(
        "warn",
        "The job shows it (warn), or also stops, as with `jobs stop`.",
        choices=("warn", "stop"),
    )

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if self.below is None and self.above is None:
            raise ConfigError("below: is missing, and so is above; give at least one of them")
        if self.below is not None and self.above is not None and self.below > self.above:
            raise ConfigError(f"below: {self.below} is more than above ({self.above})")

    @property
    def text(self) -> str:
        """The rule for people, such as ``auc below 0.7``."""
        sides = (("below", self.below), ("above", self.above))
        limits = " or ".join(f"{side} {limit:g}" for side, limit in sides if limit is not None)
        return f"{'decayed ' if self.over == 'decayed' else ''}{self.metric} {limits}"

    def is_bad(self, value: float) -> bool:
        """Return whether a value is beyond what the rule allows."""
        is_low = self.below is not None and value < self.below
        return is_low or (self.above is not None and value > self.above)


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """When the job has the servers save model and progress together."""

    SHORT: ClassVar[str] = "every"

    every: str = setting(
        "pass", "Save at the end of each pass, or never.", choices=("pass", "none")
    )
    every_tasks: int = setting(
        0, "Save also after so many tasks. 0: no.", minimum=0, maximum=2**31 - 1
    )
    url: str = setting(
        "",
        "Own servers: folder or URL for checkpoints, which no other job may use. Empty: "
        "`checkpoints` in `log_dir`; needed on Kubernetes.",
    )

    stop_wait_s: int = setting(
        120,
        "Own servers: time limit of saving when the job is stopped. 0: it does not save.",
        minimum=0,
        maximum=86_400,
    )
    unsaved_wait_s: int = setting(
        86_400,
        "Own servers: how long the last checkpoint is retried before the job ends as `unsaved`.",
        minimum=0,
        maximum=2**31 - 1,
    )

    @property
    def is_wanted(self) -> bool:
        """Whether the job saves at all, and so also its end."""
        return self.every != "none" or self.every_tasks > 0

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)


@dataclass(frozen=True, kw_only=True)
class LifetimeSpec:
    """What the end of a pass does to the rows of tables with a lifetime."""

    SHORT: ClassVar[str] = "every"

    every: str = setting(
        "pass",
        "At the end of each pass, decay shows and clicks and expire rows, as the tables' lifetimes "
        "say where they name no period of their own; or never.",
        choices=("pass", "none"),
    )
    unseen_passes: int = setting(
        0,
        "Expire also rows that no push has named in so many whole passes, in tables that keep when "
        "a row was last seen. 0: no.",
        minimum=0,
        maximum=1000,
    )

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if self.unseen_passes and self.every == "none":
            raise ConfigError("unseen_passes: needs `every: pass`")


@dataclass(frozen=True, kw_only=True)
class ExportTopicSpec:
    """A topic of Kafka that has the rows of an export."""

    name: str = setting(..., "Name of the topic; it must be compacted, and is made if missing.")
    brokers: tuple[str, ...] = setting(..., "Addresses, `host:port`.")
    settings: Mapping[str, str] = setting(
        dict, "Settings of the client, librdkafka; everyone sees them."
    )
    settings_file: str = setting(
        "", "File on each server with lines of `name=value`, such as secrets."
    )

    def __post_init__(self) -> None:
        """Check the values; refuse settings that the export decides, and secrets."""
        check(self)
        if not _TOPIC.fullmatch(self.name) or self.name in (".", ".."):
            raise ConfigError(
                f"name: topic {self.name[:300]!r} is not 1 to 249 of A-Z a-z 0-9 _ . -, as Kafka's "
                "are"
            )
        brokers = ",".join(self.brokers)
        if not all(self.brokers) or not 1 <= len(brokers) <= _TEXT_MAX:
            raise ConfigError(f"brokers: topic {self.name}: no brokers; name addresses, host:port")
        if len(self.settings) > _KAFKA_SETTINGS_MAX or len(self.settings_file) > _TEXT_MAX:
            raise ConfigError(
                f"settings: topic {self.name}: over {_KAFKA_SETTINGS_MAX}, or a long path"
            )
        for name, value in self.settings.items():
            if not name or len(name) + len(value) > _TEXT_MAX:
                raise ConfigError(f"settings: topic {self.name}: {name[:200]!r} is too long")
            if _SECRET.search(name):
                raise ConfigError(
                    f"settings: topic {self.name}: {name} is a secret, which everyone would see: "
                    "put it into a settings file on each node"
                )
        self.check_ours(self.settings)

    def is_same(self, other: ExportTopicSpec | None) -> bool:
        """Return whether it is the same topic, as far as names tell."""
        return other is not None and (
            other.name == self.name and bool(set(other.brokers) & set(self.brokers))
        )

    def check_ours(self, settings: Iterable[str]) -> None:
        """Refuse settings of the client that the export decides.

        Raises:
            ConfigError: There is one among them.
        """
        if wrong := sorted(_OURS & set(settings)):
            raise ConfigError(
                f"settings: topic {self.name}: {wrong[0]} cannot be set; backstay decides it"
            )


@dataclass(frozen=True, kw_only=True)
class ExportsSpec:
    """Where the model goes again and again while the job trains it.

    The section of the job file is also what the cluster is asked for and what its record keeps.
    """

    SHORT: ClassVar[str] = "url"

    url: str = setting(..., "Folder or URL that every server reaches; each job has its own.")
    every_s: float = setting(
        1.0, "Seconds from one increment to the next.", minimum=0.1, maximum=86_400.0
    )
    every_pushes: int = setting(
        0,
        "An increment comes earlier when a server has applied so many pushes since the last "
        "one; 0: by time alone.",
        minimum=0,
        maximum=10**12,
    )
    tables: tuple[str, ...] = setting(
        (),
        "Tables of the job, without its name before them; `*` and `?` stand for characters. None: "
        "all.",
    )
    statistics: bool = setting(False, "Export statistics of rows, too.")
    score_at_least: float | None = setting(
        None, "Leave out rows of a lower score, in tables whose lifetime uses one."
    )
    topic: ExportTopicSpec | None = setting(None, "Topic of Kafka that has the rows, too.")

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if not 1 <= len(self.url) <= _TEXT_MAX:
            raise ConfigError(f"url: is not of 1 to {_TEXT_MAX} characters: names no folder or URL")
        if self.score_at_least is not None and not math.isfinite(self.score_at_least):
            raise ConfigError(f"score_at_least: {self.score_at_least} is no number")


@dataclass(frozen=True, kw_only=True)
class WorkersSpec:
    """How many workers, and what happens when they end."""

    SHORT: ClassVar[str] = "initial"

    initial: int = setting(2, "Workers to begin with.", minimum=0, maximum=WORKERS_MAX)
    min: int = setting(
        1, "Least that `jobs scale` and `autoscale` go to.", minimum=0, maximum=WORKERS_MAX
    )
    max: int = setting(
        WORKERS_MAX, "Most that `jobs scale` and `autoscale` go to.", minimum=1, maximum=WORKERS_MAX
    )
    max_relaunches: int = setting(
        10,
        "How often in a row a failed worker is replaced.",
        minimum=0,
        maximum=1_000_000,
    )
    env: Mapping[str, str] = setting(dict, "More environment variables.")

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if not self.min <= self.initial <= self.max:
            raise ConfigError(
                f"initial: {self.initial} is not between min ({self.min}) and max ({self.max})"
            )


class ServerCounts(NamedTuple):
    """How many servers of its own a job has.

    Attributes:
        initial: Servers that are started with it.
        least: With so many it begins; ``autoscale`` keeps as many.
        most: ``autoscale`` goes no further.
    """

    initial: int
    least: int
    most: int


@dataclass(frozen=True, kw_only=True)
class ServersSpec:
    """The parameter servers: those of a cluster that runs, or some for this job alone."""

    local: int = setting(
        0,
        "Servers to start for this job, on this machine or as Pods.",
        minimum=0,
        maximum=SERVERS_MAX,
    )
    min: int = setting(
        0,
        "Own Pods: with so many the job begins, and `autoscale` keeps as many. 0: all.",
        minimum=0,
        maximum=SERVERS_MAX,
    )
    max: int = setting(
        SERVERS_MAX,
        "Own Pods: most that `autoscale` goes to.",
        minimum=1,
        maximum=SERVERS_MAX,
    )
    endpoints: tuple[str, ...] = setting(
        (),
        "Control addresses of a running cluster. Default: BACKSTAY_ENDPOINT, else 3 own servers.",
    )
    replicas: int = setting(2, "Own servers: copies of each slot.", minimum=1, maximum=3)
    settings: Mapping[str, Any] = setting(dict, "Own servers: other settings of `pserver serve`.")

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if self.local and self.endpoints:
            raise ConfigError("endpoints: given together with local; leave one of them out")
        if self.local:
            self.counts(self.local)

    def counts(self, initial: int) -> ServerCounts:
        """Return how many servers of its own the job has, if it begins with so many.

        Raises:
            ConfigError: That does not fit ``min``, ``max`` or ``replicas``.
        """
        least = self.min or initial
        if not least <= initial <= self.max:
            raise ConfigError(f"local: {initial} is not between min ({least}) and max ({self.max})")
        copies = min(self.replicas, initial)
        if least < copies:
            raise ConfigError(
                f"min: {least} servers cannot keep the {copies} copies of each slot "
                "(replicas); give more servers or fewer copies"
            )
        return ServerCounts(initial, least, self.max)


@dataclass(frozen=True, kw_only=True)
class AutoscaleSpec:
    """By which rules a job on Kubernetes changes its numbers of workers and servers."""

    SHORT: ClassVar[str] = "workers"

    workers: str = setting(
        "fixed",
        "fill: as many as find room. throughput: one more while it brings `gain`.",
        choices=WORKER_RULES,
    )
    gain: float = setting(
        0.5,
        "throughput: what one more worker must bring, as a share of one's examples/s.",
        minimum=0.0,
        maximum=1.0,
    )
    servers: str = setting(
        "fixed",
        "load: by their memory and CPU.",
        choices=SERVER_RULES,
    )
    load_low: float = setting(
        0.4,
        "load: a server goes if the others then use less than this share.",
        minimum=0.0,
        maximum=1.0,
    )
    load_high: float = setting(
        0.8, "load: servers come if more than this share is used.", minimum=0.01, maximum=1.0
    )
    cool_down_s: float = setting(
        60.0,
        "How long a state must last before it changes a number.",
        minimum=1.0,
        maximum=86_400.0,
    )

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if self.load_low >= self.load_high:
            raise ConfigError(
                f"load_low: {self.load_low} is not below load_high ({self.load_high})"
            )


@dataclass(frozen=True, kw_only=True)
class HooksSpec:
    """Commands run on this machine by ``/bin/sh`` around the job."""

    before: tuple[str, ...] = setting((), "Commands before the job; if one fails, the job fails.")
    after: tuple[str, ...] = setting((), "Commands after the job, however it ended.")
    each_pass: tuple[str, ...] = setting(
        (), "Commands at the end of each pass or period, while the job goes on."
    )
    timeout_s: int = setting(3600, "Time limit of one command.", minimum=1, maximum=7 * 86_400)

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job.

    Example:
        >>> spec = JobSpec(name="census", model="model.py", training=DataSpec(paths=("a.csv",)))
        >>> JobSpec.from_json(spec.to_json()) == spec
        True
    """

    name: str = setting(..., "The same name continues the same job.", fixed=True)
    profile: str = setting(
        "none",
        "How long the job runs; decides copies and checkpoints that are not set.",
        choices=("none", *PROFILES),
    )
    model: str = setting(..., "The Python file that defines the model.", fixed=True)
    model_params: Mapping[str, Any] = setting(
        dict, "Arguments of the file's `custom_model`.", fixed=True
    )
    callback_params: Mapping[str, Any] = setting(dict, "Arguments of the file's `callbacks`.")
    model_from: str = setting(
        "",
        "Evaluate or predict with the tables of that job. Empty: its own.",
        fixed=True,
    )
    framework: str = setting(
        "auto", "auto goes by what `custom_model` returns.", choices=FRAMEWORKS, fixed=True
    )
    training: DataSpec | None = setting(None, "Records to train on.", fixed=True)
    validation: DataSpec | None = setting(None, "Records to evaluate on.", fixed=True)
    prediction: DataSpec | None = setting(None, "Records to predict for.", fixed=True)
    epochs: int = setting(1, "Passes over the training data.", minimum=1, maximum=1_000_000)
    period: PeriodSpec | None = setting(
        None, "The training data never ends: the job has periods instead of passes."
    )
    batch_size: int = setting(
        64, "Records in a worker's batch.", minimum=1, maximum=1 << 24, fixed=True
    )
    records_per_task: int = setting(
        4096,
        "Records in a task.",
        minimum=1,
        maximum=1 << 31,
        fixed=True,
    )
    shuffle: str = setting(
        "tasks_and_records",
        "What each pass puts in a new order.",
        choices=SHUFFLES,
        fixed=True,
    )
    seed: int = setting(0, "Seed of all orders.", minimum=0, maximum=2**63 - 1, fixed=True)
    mode: ModeSpec = setting(ModeSpec, "How workers keep step.", fixed=True)
    max_steps: int = setting(
        0, "Stop after so many batches of all workers. 0: no limit.", minimum=0, maximum=2**62
    )
    evaluation_every_steps: int = setting(
        0,
        "Batches between evaluations. 0: evaluate after each pass.",
        minimum=0,
        maximum=2**62,
    )
    early_stop: EarlyStop | None = setting(None, "When to stop before the last pass.")
    progressive: ProgressiveSpec | None = setting(
        None, "Metrics of what the model predicts for each batch before it is trained on it."
    )
    alerts: tuple[AlertSpec, ...] = setting(
        (), "When a figure of `progressive` is bad, and what then happens."
    )
    max_task_retries: int = setting(
        3,
        "Retries of a failing task before it is dead-lettered.",
        minimum=0,
        maximum=1000,
    )
    max_bad_records: int = setting(
        0,
        "Most damaged records in a pass, and in the validation data; one more fails the job.",
        minimum=0,
        maximum=2**62,
    )
    checkpoint: CheckpointSpec = setting(CheckpointSpec, "When model and progress are saved.")
    lifetime: LifetimeSpec = setting(
        LifetimeSpec, "What the end of a pass does to rows of tables with a lifetime."
    )
    exports: ExportsSpec | None = setting(
        None, "Where the model goes again and again while the job trains it."
    )
    task_lease_ttl_ms: int = setting(
        2000,
        "How long a worker may be silent before its tasks go to others; at least N / 250 s "
        "for N workers.",
        minimum=200,
        maximum=600_000,
    )
    straggler_factor: float = setting(
        3.0,
        "A task that takes so many times as long as others gets a speculative attempt.",
        minimum=1.0,
    )
    straggler_min_s: float = setting(30.0, "But not before it has taken this long.", minimum=0.0)
    step_limit_s: float = setting(
        30.0,
        "sync, bounded: how long others wait for a worker's step, at least.",
        minimum=0.1,
        maximum=86_400.0,
    )
    audit: bool = setting(
        False,
        "Count each record of a pass in a table.",
        fixed=True,
    )
    output: str = setting("", "Folder or URL for predictions and exported models.")
    workers: WorkersSpec = setting(WorkersSpec, "How many workers.")
    launcher: str = setting(
        "local",
        "What starts the workers: the command, on its machine; or the job master, as Pods "
        "(`--on kubernetes`).",
        choices=LAUNCHERS,
    )
    servers: ServersSpec = setting(ServersSpec, "The parameter servers.")
    autoscale: AutoscaleSpec | None = setting(
        None, "On Kubernetes: how the numbers of workers and servers change by themselves."
    )
    kubernetes: KubernetesSpec | None = setting(None, "The Pods of the job.")
    schedule: ScheduleSpec | None = setting(None, "When Kubernetes runs the job.")
    hooks: HooksSpec = setting(HooksSpec, "Commands before and after the job.")
    log_dir: str = setting("", "Folder for logs and metrics. Empty: `backstay-jobs/NAME`.")
    tensorboard: bool = setting(False, "Write TensorBoard event files, too.")
    prometheus: str = setting(
        "",
        "Address where the job master shows the job's figures to Prometheus (HTTP, no token), such "
        "as `0.0.0.0:9464`; port 0: the system chooses. Empty: none.",
    )
    swap_embeddings_over_bytes: int = setting(
        2 * 1024 * 1024,
        "Larger embedding layers are kept on the servers.",
        minimum=0,
        maximum=2**62,
        fixed=True,
    )

    def __post_init__(self) -> None:
        """Check the values, each alone and then together."""
        check(self)
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
        if self.progressive is not None and self.training is None:
            raise ConfigError("progressive: needs training data")
        if self.alerts and self.progressive is None:
            raise ConfigError("alerts: need `progressive`, whose figures they watch")
        _check_alerts(self.alerts)
        if self.prometheus:
            split_address("prometheus", self.prometheus)
        if self.period is not None:
            self._check_period(self.period)
        self._check_stream_options()
        if len(self.to_json().encode()) > SPEC_BYTES_MAX:
            raise ConfigError(
                f"name: the job {self.name!r} takes more than {SPEC_BYTES_MAX} bytes as JSON; "
                "name folders or patterns instead of single files"
            )

    def _check_period(self, period: PeriodSpec) -> None:
        """Refuse periods that do not go with the rest."""
        if self.training is None or self.training.kind not in STREAM_KINDS:
            raise ConfigError(
                f"period: needs training data of kind {' or '.join(STREAM_KINDS)}, which may never "
                "end; name the kind, there may be no file yet"
            )
        if period.folders and self.training.kind == "kafka":
            raise ConfigError(
                "period.folders: is given, and training is of kind kafka; give records or seconds"
            )
        if self.epochs != 1:
            raise ConfigError(
                f"epochs: {self.epochs} is given together with period; leave epochs out, a job "
                "with periods never goes over its data again"
            )
        if "stop" in self.training.options:
            raise ConfigError(
                "training.options.stop: is given together with period; leave one of them out, "
                "with a period the data has no end"
            )
        if period.ahead_records < self.records_per_task:
            raise ConfigError(
                f"period.ahead_records: {period.ahead_records} is less than a task has "
                f"(records_per_task, {self.records_per_task})"
            )

    def _check_stream_options(self) -> None:
        """Refuse options of data without an end where data have one."""
        for name, data in self.data.items():
            names = _TOPIC_OPTIONS if data.kind == "kafka" else _FOLDER_OPTIONS
            given = [option for option in names if option in data.options]
            if given and data.kind in STREAM_KINDS and not self.grows(name):
                raise ConfigError(
                    f"{name}.options.{given[0]}: is for training data without an end; give "
                    "`period`, or leave it out"
                )

    @property
    def is_stream(self) -> bool:
        """Whether its training data never ends."""
        return self.period is not None

    def grows(self, name: str) -> bool:
        """Return whether one of its data never ends."""
        return self.is_stream and name == "training"

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
        differing = [
            item.name
            for item in fields(self)
            if item.metadata["fixed"] and getattr(self, item.name) != getattr(other, item.name)
        ]
        # How long a period is may change, but not whether there are any.
        if self.is_stream != other.is_stream:
            differing.append("period")
        elif self.is_stream and self._has_same_source(other):
            differing = [name for name in differing if name != "training"]
        return tuple(differing)

    def _has_same_source(self, other: JobSpec) -> bool:
        """Whether the training data have the same records, however they are reached."""
        found = []
        for one in (self, other):
            assert one.training is not None
            options = one.training.options.items()
            kept = {name: value for name, value in options if name not in ACCESS_OPTIONS}
            found.append(replace(one.training, options=kept))
        return found[0] == found[1]


def _check_alerts(alerts: Sequence[AlertSpec]) -> None:
    if len(alerts) > ALERTS_MAX:
        raise ConfigError(f"alerts: {len(alerts)} are more than {ALERTS_MAX}")
    texts = [alert.text for alert in alerts]
    for number, text in enumerate(texts):
        if text in texts[:number]:
            raise ConfigError(f"alerts.{number}: {text!r} is there already")


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
