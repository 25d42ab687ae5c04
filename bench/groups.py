"""What is measured beside what: the groups of contestants, and the ratios made of them.

A group's contestants run in turn within each round, so that a ratio compares what met the same
machine. Pure but for the paths it asks the workshop for, which builds a program when needed.

Two ways to count a rate, and a ratio uses the same on both sides:

- ``keys_per_s``, from the median step: what a step costs when nothing disturbs it. For programs
  that finish each step before the next.
- ``mean_keys_per_s``, all keys over all time: for programs whose work runs across the borders of
  steps (overlapped pulls, the peers' background sends, several trainers).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench.programs import Workshop

__all__ = ["GROUPS", "Group", "Ratio", "Sizes"]

Command = Callable[[Workshop, "Sizes"], list[str]]
# Two servers, each the backup of the other's slots.
TWO_COPIES = ("--servers", "2", "--copies", "2")
HALF_NEW = ("--new-share", "0.5")


@dataclass(frozen=True)
class Sizes:
    """How much each contestant does in one round.

    Attributes:
        steps: Timed steps of the small and of the big batches.
        peer_steps: The same for the peers, which take several times as long a step.
        seconds: Length of the timed part of the scaling job.
        dense_bytes, dense_repeats: Size of the dense tensor and number of transfers each way.
        memory_rows: Rows of the memory job.
        recovery_rows: Rows that are copied to a new server.
        checkpoint_gb: State that is written and restored.
        resize_gb: State of the cluster that grows and shrinks.
        normal_s: Length of the part of a job in which nothing happens besides pushes.
        drop_cache: Whether the system is to forget files before they are read.
        nodes: Nodes of the controller's large cluster.
        tasks, workers: Size of the job whose ledger is measured.
        train_records: Records of the training job, once each.
    """

    steps: Mapping[int, int] = field(default_factory=lambda: {53_248: 300, 3_328: 4_000})
    peer_steps: Mapping[int, int] = field(default_factory=lambda: {53_248: 60, 3_328: 300})
    seconds: float = 4.0
    dense_bytes: int = 64 << 20
    dense_repeats: int = 30
    memory_rows: int = 10_000_000
    recovery_rows: int = 14_000_000
    checkpoint_gb: float = 4.0
    resize_gb: float = 1.0
    normal_s: float = 10.0
    drop_cache: bool = True
    nodes: int = 1000
    tasks: int = 1_000_000
    workers: int = 10_000
    train_records: int = 800_000

    @staticmethod
    def quick() -> Sizes:
        """Just enough to see that everything runs."""
        return Sizes(
            steps={53_248: 10, 3_328: 50},
            peer_steps={53_248: 10, 3_328: 20},
            seconds=0.5,
            dense_bytes=4 << 20,
            dense_repeats=5,
            memory_rows=200_000,
            recovery_rows=200_000,
            checkpoint_gb=0.02,
            resize_gb=0.02,
            normal_s=0.5,
            drop_cache=False,  # it is the cache of all programs
            nodes=50,
            tasks=2000,
            workers=100,
            train_records=60_000,
        )


@dataclass(frozen=True)
class Ratio:
    """A figure: one field of one contestant over the same or another field of a second one.

    ``below`` empty takes the field as it is.
    """

    name: str
    above: str
    below: str
    field: str


@dataclass(frozen=True)
class Group:
    """Contestants that run in turn, and the figures made of them."""

    contestants: Mapping[str, Command]
    ratios: tuple[Ratio, ...]
    raw: tuple[tuple[str, str], ...]  # (contestant, field) reported as they are
    most_rounds: int | None = None


def ceiling(keys_per_step: int) -> Command:
    return lambda workshop, sizes: [
        workshop.compiled("ceiling"),
        f"keys_per_step={keys_per_step}",
        f"steps={sizes.steps[keys_per_step]}",
    ]


def backstay(job: str, options: Callable[[Sizes], list[str]]) -> Command:
    return lambda _, sizes: [sys.executable, "-m", f"bench.jobs.{job}", *options(sizes)]


def sparse(keys_per_step: int, *options: str) -> Command:
    return backstay(
        "sparse_step",
        lambda sizes: [
            *("--keys-per-step", str(keys_per_step)),
            *("--steps", str(sizes.steps[keys_per_step])),
            *options,
        ],
    )


def scaling(trainers: int, servers: int) -> Command:
    return backstay(
        "scaling",
        lambda sizes: [
            *("--trainers", str(trainers), "--servers", str(servers)),
            *("--seconds", str(sizes.seconds)),
        ],
    )


def training(*options: str) -> Command:
    return backstay("train", lambda sizes: ["--rows", str(sizes.train_records), *options])


def peer(name: str, keys_per_step: int, *options: str) -> Command:
    return lambda workshop, sizes: [
        workshop.peer_python(name),
        f"bench/peers/{name}_ps.py",
        *("--batch", str(keys_per_step // 26)),
        *("--steps", str(sizes.peer_steps[keys_per_step])),
        *options,
    ]


def copy(workshop: Workshop, sizes: Sizes) -> list[str]:
    return [
        workshop.compiled("loopback_copy"),
        f"bytes={sizes.dense_bytes}",
        f"repeats={sizes.dense_repeats}",
    ]


def steps_group(keys_per_step: int) -> Group:
    name = f"sparse_{keys_per_step}"
    return Group(
        contestants={
            "ceiling": ceiling(keys_per_step),
            "backstay": sparse(keys_per_step),
            "overlapped": sparse(keys_per_step, "--overlapped"),
            "two_copies": sparse(keys_per_step, *TWO_COPIES),
            "two_copies_overlapped": sparse(keys_per_step, *TWO_COPIES, "--overlapped"),
            "paddle": peer("paddle", keys_per_step),
            "tensorflow": peer("tensorflow", keys_per_step),
        },
        ratios=(
            Ratio(f"{name}_over_ceiling", "backstay", "ceiling", "keys_per_s"),
            Ratio(f"{name}_overlapped_over_ceiling", "overlapped", "ceiling", "mean_keys_per_s"),
            Ratio(f"{name}_two_copies_over_ceiling", "two_copies", "ceiling", "keys_per_s"),
            Ratio(
                f"{name}_two_copies_overlapped_over_ceiling",
                "two_copies_overlapped",
                "ceiling",
                "mean_keys_per_s",
            ),
            Ratio(f"{name}_two_copies_over_paddle", "two_copies", "paddle", "mean_keys_per_s"),
            Ratio(
                f"{name}_two_copies_over_tensorflow", "two_copies", "tensorflow", "mean_keys_per_s"
            ),
            Ratio(f"{name}_over_paddle", "backstay", "paddle", "mean_keys_per_s"),
            Ratio(f"{name}_over_tensorflow", "backstay", "tensorflow", "mean_keys_per_s"),
        ),
        raw=(
            ("ceiling", "keys_per_s"),
            ("backstay", "keys_per_s"),
            ("overlapped", "mean_keys_per_s"),
            ("two_copies", "keys_per_s"),
            ("two_copies_overlapped", "mean_keys_per_s"),
            ("paddle", "mean_keys_per_s"),
            ("tensorflow", "mean_keys_per_s"),
        ),
    )


GROUPS: Mapping[str, Group] = {
    "sparse_53248": steps_group(53_248),
    "sparse_3328": steps_group(3_328),
    "zipf": Group(
        contestants={
            "backstay": sparse(53_248, "--zipf", "1.2"),
            "paddle": peer("paddle", 53_248, "--skew", "1.2"),
        },
        ratios=(Ratio("zipf_over_paddle", "backstay", "paddle", "mean_keys_per_s"),),
        raw=(("backstay", "mean_keys_per_s"), ("paddle", "mean_keys_per_s")),
    ),
    "lifetime": Group(
        contestants={
            "none": sparse(53_248),
            "statistics": sparse(53_248, "--lifetime", "statistics"),
            "none_new": sparse(53_248, *HALF_NEW),
            "admission": sparse(53_248, "--lifetime", "admission", *HALF_NEW),
            "filter": sparse(53_248, "--lifetime", "filter", *HALF_NEW),
            "paddle": peer("paddle", 53_248, "--accessor", "ctr"),
        },
        ratios=(
            Ratio("lifetime_over_none", "statistics", "none", "keys_per_s"),
            Ratio("admission_over_none", "admission", "none_new", "keys_per_s"),
            Ratio("filter_over_none", "filter", "none_new", "keys_per_s"),
            Ratio("lifetime_over_paddle", "statistics", "paddle", "mean_keys_per_s"),
        ),
        raw=(
            ("none", "keys_per_s"),
            ("statistics", "keys_per_s"),
            ("none_new", "keys_per_s"),
            ("admission", "keys_per_s"),
            ("filter", "keys_per_s"),
            ("paddle", "mean_keys_per_s"),
        ),
    ),
    "dense": Group(
        contestants={
            "copy": copy,
            "backstay": backstay(
                "dense",
                lambda sizes: [
                    *("--bytes", str(sizes.dense_bytes)),
                    *("--repeats", str(sizes.dense_repeats)),
                ],
            ),
        },
        ratios=(
            Ratio("dense_pull_over_copy", "backstay", "copy", "pull_gb_per_s"),
            Ratio("dense_push_over_copy", "backstay", "copy", "push_gb_per_s"),
        ),
        raw=(
            ("copy", "pull_gb_per_s"),
            ("copy", "push_gb_per_s"),
            ("backstay", "pull_gb_per_s"),
            ("backstay", "push_gb_per_s"),
        ),
    ),
    "memory": Group(
        contestants={
            "backstay": backstay("memory", lambda sizes: ["--rows", str(sizes.memory_rows)])
        },
        ratios=(Ratio("memory_over_payload", "backstay", "", "over_payload"),),
        raw=(
            ("backstay", "peak_over_payload"),
            ("backstay", "bytes_per_row"),
            ("backstay", "rows_per_s"),
        ),
        most_rounds=1,  # bytes do not depend on what else the machine does
    ),
    "recovery": Group(
        contestants={
            "backstay": backstay("recovery", lambda sizes: ["--rows", str(sizes.recovery_rows)])
        },
        ratios=(Ratio("recovery_over_normal", "backstay", "", "copying_over_normal"),),
        raw=(
            ("backstay", "payload_gb"),
            ("backstay", "copying_s"),
            ("backstay", "normal_steps_per_s"),
            ("backstay", "alone_steps_per_s"),
            ("backstay", "copying_steps_per_s"),
        ),
        most_rounds=3,  # each takes a minute
    ),
    "checkpoint": Group(
        contestants={
            "backstay": backstay(
                "checkpoint",
                lambda sizes: [
                    *("--gb", str(sizes.checkpoint_gb)),
                    *("--seconds", str(sizes.normal_s)),
                ],
            )
        },
        ratios=(
            Ratio("checkpoint_over_disk", "backstay", "", "save_over_disk"),
            Ratio("checkpoint_p99_over_normal", "backstay", "", "p99_over_normal"),
            Ratio("checkpoint_changed_over_full", "backstay", "", "changed_over_full"),
            Ratio("checkpoint_memory_over_state", "backstay", "", "memory_over_state"),
        ),
        raw=(
            ("backstay", "state_gb"),
            ("backstay", "disk_gb_per_s"),
            ("backstay", "disk_after_over_before"),
            ("backstay", "save_gb_per_s"),
            ("backstay", "save_s"),
            ("backstay", "changed_s"),
            ("backstay", "loaded_save_s"),
            ("backstay", "normal_p99_ms"),
            ("backstay", "loaded_p99_ms"),
            ("backstay", "loaded_longest_ms"),
            ("backstay", "pushes_over_normal"),
            ("backstay", "memory_mb"),
            ("backstay", "loaded_memory_mb"),
        ),
        most_rounds=3,  # each takes two minutes
    ),
    "restore": Group(
        contestants={
            "backstay": backstay(
                "restore",
                lambda sizes: [
                    *("--gb", str(sizes.checkpoint_gb)),
                    *(() if sizes.drop_cache else ("--keep-cache",)),
                ],
            )
        },
        ratios=(Ratio("restore_over_disk", "backstay", "", "restore_over_disk"),),
        raw=(
            ("backstay", "cache_dropped"),
            ("backstay", "disk_gb_per_s"),
            ("backstay", "disk_after_over_before"),
            ("backstay", "loading_gb_per_s"),
            ("backstay", "loading_over_disk"),
            ("backstay", "ready_s"),
            ("backstay", "loaded_s"),
            ("backstay", "first_pull_s"),
        ),
        most_rounds=3,  # each takes a minute
    ),
    "resize": Group(
        contestants={
            "backstay": backstay(
                "resize",
                lambda sizes: [
                    *("--gb", str(sizes.resize_gb)),
                    *("--seconds", str(sizes.normal_s)),
                ],
            )
        },
        ratios=(
            Ratio("resize_over_normal", "backstay", "", "pushes_over_normal"),
            Ratio("resize_longest_push_s", "backstay", "", "longest_push_s"),
            Ratio("resize_moved_over_minimum", "backstay", "", "moved_over_fewest"),
        ),
        raw=(
            ("backstay", "state_gb"),
            ("backstay", "normal_pushes_per_s"),
            ("backstay", "normal_longest_push_s"),
            ("backstay", "grow_over_normal"),
            ("backstay", "shrink_over_normal"),
            ("backstay", "quiet_grow_s"),
            ("backstay", "quiet_shrink_s"),
            ("backstay", "grow_s"),
            ("backstay", "shrink_s"),
            ("backstay", "loaded_moved_over_fewest"),
            ("backstay", "waiting_over_time"),
        ),
        most_rounds=3,  # each takes a minute
    ),
    "controller": Group(
        contestants={
            "backstay": backstay("controller", lambda sizes: ["--nodes", str(sizes.nodes)])
        },
        ratios=(Ratio("controller_s", "backstay", "", "total_s"),),
        raw=(
            ("backstay", "read_ms"),
            ("backstay", "decide_ms"),
            ("backstay", "write_ms"),
            ("backstay", "record_bytes"),
        ),
    ),
    "tasks": Group(
        contestants={
            "backstay": backstay(
                "tasks",
                lambda sizes: ["--tasks", str(sizes.tasks), "--workers", str(sizes.workers)],
            )
        },
        ratios=(Ratio("tasks_busy", "backstay", "", "busy"),),
        raw=(
            ("backstay", "tasks_per_s"),
            ("backstay", "renewals_per_s"),
            ("backstay", "peak_mb"),
        ),
        most_rounds=3,  # each takes a minute or two
    ),
    "train": Group(
        contestants={
            "plain": training("--plain"),
            "workers_1": training("--workers", "1"),
            "workers_2": training("--workers", "2"),
            "tasks_1000": training("--workers", "1", "--records-per-task", "1000"),
            "tasks_20000": training("--workers", "1", "--records-per-task", "20000"),
        },
        ratios=(
            Ratio("train_1_over_plain", "workers_1", "plain", "examples_per_s"),
            Ratio("train_2_over_1", "workers_2", "workers_1", "examples_per_s"),
            Ratio("train_tasks_1000_over_20000", "tasks_1000", "tasks_20000", "examples_per_s"),
        ),
        raw=(
            ("plain", "examples_per_s"),
            ("workers_1", "examples_per_s"),
            ("workers_2", "examples_per_s"),
            ("tasks_1000", "examples_per_s"),
            ("tasks_20000", "examples_per_s"),
        ),
        most_rounds=3,  # each takes minutes
    ),
    "scaling": Group(
        contestants={
            "trainers_1": scaling(1, 1),
            "trainers_4": scaling(4, 1),
            "servers_2": scaling(1, 2),
            "trainers_4_servers_2": scaling(4, 2),
        },
        ratios=(
            Ratio("trainers_4_over_1", "trainers_4", "trainers_1", "mean_keys_per_s"),
            Ratio("servers_2_over_1", "servers_2", "trainers_1", "mean_keys_per_s"),
            Ratio(
                "servers_2_over_1_trainers_4",
                "trainers_4_servers_2",
                "trainers_4",
                "mean_keys_per_s",
            ),
        ),
        raw=(
            ("trainers_1", "mean_keys_per_s"),
            ("trainers_4", "mean_keys_per_s"),
            ("servers_2", "mean_keys_per_s"),
            ("trainers_4_servers_2", "mean_keys_per_s"),
        ),
    ),
}
