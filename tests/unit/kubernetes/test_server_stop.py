"""Whether a job needs the rows of its own servers follows from its records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backstay.consensus.records.jobs import RunState
from backstay.errors import ServerUnavailable
from backstay.exit_codes import ExitCode
from backstay.job_spec import CheckpointSpec
from backstay.kubernetes.server_stop import NO_ANSWER_S, are_rows_needed, wait_for_copies
from backstay.schedule.rounds import RoundId, RoundKind
from tests.memory_store import MemoryBackend, MemoryStore
from tests.unit.job_records_of import KEYS, counting_spec, master_of
from tests.unit.memory_nodes import run

DURABLE_S = 5.0


@pytest.mark.parametrize(
    ("end", "every", "steps", "saved", "needed"),
    [
        (None, "pass", 0, 0, True),
        ("done", "pass", 7, 7, False),
        ("failed", "pass", 7, 0, False),
        # Only its servers have what the last checkpoint lacks.
        ("unsaved", "pass", 7, 0, True),
        # The checkpoint of a job that is stopped comes after the order.
        ("stopped", "pass", 7, 0, True),
        ("stopped", "pass", 7, 7, False),
        ("stopped", "none", 7, 0, False),
    ],
)
def test_rows_are_needed_until_the_job_is_over_and_saved(
    tmp_path: Path, end: RunState | None, every: str, steps: int, saved: int, needed: bool
) -> None:
    async def inside(backend: MemoryBackend) -> None:
        spec = counting_spec(tmp_path, checkpoint=CheckpointSpec(every=every))
        async with master_of(MemoryStore(backend), spec, 1) as (_, job):
            if steps:
                job.schedule.count_steps(RoundId(RoundKind.TRAINING, 1), steps)
            if saved:
                job.note_checkpoint("ckpt-1", saved, "/checkpoints")
            if end is not None:
                job.end(end, "for a test")
            job.stage_state()
            await job.journal.durable(DURABLE_S)
            found = (await MemoryStore(backend).range(KEYS.root)).values()
            records = {key: item.value for key, item in found.items()}
            assert are_rows_needed(KEYS, records) is needed

    run(inside)


def test_rows_of_a_job_that_has_not_begun_are_needed() -> None:
    assert are_rows_needed(KEYS, {})


class Answers:
    """What a server says at a time of a clock that only the waits move; None: nothing."""

    def __init__(self, short_at: Callable[[float], int | None]) -> None:
        self.now_s = 0.0
        self._short_at = short_at

    def wait(self, wait_s: float, *, are_needed: bool = True) -> int:
        return wait_for_copies(
            self._count,
            lambda: are_needed,
            wait_s,
            now=lambda: self.now_s,
            sleep=self._sleep,
        )

    def _count(self) -> int:
        short = self._short_at(self.now_s)
        if short is None:
            raise ServerUnavailable("no answer")
        return short

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_an_answer_that_is_missing_for_a_moment_costs_no_only_copy() -> None:
    # Three times for less than the limit, with answers between them.
    answers = Answers(
        lambda now_s: 0 if now_s >= 30 else None if now_s % NO_ANSWER_S < NO_ANSWER_S - 1 else 7
    )
    assert answers.wait(60.0) == 0
    assert answers.now_s == 30.0


def test_a_server_that_never_answers_ends_before_the_time_is_over() -> None:
    answers = Answers(lambda _: None)
    assert answers.wait(60.0) == ExitCode.NO_ANSWER
    assert answers.now_s == NO_ANSWER_S
    answers = Answers(lambda _: None)
    assert answers.wait(2.0) == ExitCode.NO_ANSWER
    assert answers.now_s == 2.0


def test_a_server_ends_when_the_time_is_over_or_nobody_needs_its_rows() -> None:
    answers = Answers(lambda _: 7)
    assert answers.wait(60.0) == ExitCode.FAILED
    assert answers.now_s == 60.0
    assert Answers(lambda _: 7).wait(60.0, are_needed=False) == 0
