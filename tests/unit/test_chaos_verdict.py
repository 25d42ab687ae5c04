"""The judge of the fault-injection suite finds what is planted, and only that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.chaos.history import LARGE_EVERY, History, Push, Shape, Writer, keys_of, parse
from tests.chaos.report import Struck, failover_figures, throughput
from tests.chaos.verdict import Copy, SavedTable, Verdict, judge, judge_checkpoints

SHAPE = Shape(seed=5, universe=256, hot=4, batch=12)
SLOTS = 8
SLOT_OF_KEY = (np.arange(SHAPE.universe) * 7 % SLOTS).astype(np.uint32)
DIM = 4


def history(stream: int, *outcomes: str) -> History:
    kinds = {"a": "acknowledged", "n": "not_applied", "u": "unknown"}
    pushes = {
        number: Push(stream, number, 1, kinds[outcome], 2)  # type: ignore[arg-type]
        for number, outcome in enumerate(outcomes)
    }
    return History(stream, SHAPE, pushes, reads=1, ended=True)


def table_of(*histories: History) -> NDArray[np.float32]:
    """The table as it must be, with nothing of the pushes of unknown outcome."""
    table = np.zeros((SHAPE.universe, DIM), dtype=np.float32)
    for one in histories:
        for push in one.pushes.values():
            if push.outcome == "acknowledged":
                table[keys_of(SHAPE, push.stream, push.sequence)] += 1
    return table


def equal_copies(replicas: int = 2) -> dict[int, list[Copy]]:
    return {
        slot: [Copy(f"ps-{n}", slot, 3, 40, 0xABC) for n in range(replicas)]
        for slot in range(SLOTS)
    }


def judged(
    histories: list[History],
    table: NDArray[np.float32] | None,
    copies: dict[int, list[Copy]] | None = None,
) -> Verdict:
    return judge(histories, table, SLOT_OF_KEY, copies or equal_copies(), replicas=2)


@pytest.fixture
def two() -> list[History]:
    return [history(0, *"aaaaaaaa"), history(1, *"aaanaaaa")]


def test_what_was_acknowledged_and_nothing_else_is_true(two: list[History]) -> None:
    verdict = judged(two, table_of(*two))
    assert (verdict.verdict, verdict.why) == ("true", [])
    assert (verdict.acknowledged, verdict.unknown_outcome, verdict.reads) == (15, 0, 2)


def test_a_lost_push_is_found(two: list[History]) -> None:
    table = table_of(*two)
    keys = keys_of(SHAPE, 1, 4)
    table[keys] -= 1
    verdict = judged(two, table)
    assert (verdict.verdict, verdict.lost, verdict.duplicated) == ("false", len(keys), 0)


def test_a_push_lost_in_one_slot_only_is_found(two: list[History]) -> None:
    table = table_of(*two)
    keys = keys_of(SHAPE, 0, 2)
    keys = keys[SLOT_OF_KEY[keys] == SLOT_OF_KEY[keys[0]]]
    table[keys] -= 1
    verdict = judged(two, table)
    assert (verdict.verdict, verdict.lost) == ("false", len(keys))
    assert verdict.why[0].startswith(f"slot {SLOT_OF_KEY[keys[0]]}, key {keys[0]}: 1 missing")


def test_a_push_applied_twice_is_found(two: list[History]) -> None:
    table = table_of(*two)
    keys = keys_of(SHAPE, 0, 7)
    table[keys] += 1
    verdict = judged(two, table)
    assert (verdict.verdict, verdict.lost, verdict.duplicated) == ("false", 0, len(keys))


def test_a_push_that_was_refused_and_yet_applied_is_found(two: list[History]) -> None:
    table = table_of(*two)
    table[keys_of(SHAPE, 1, 3)] += 1
    assert judged(two, table).verdict == "false"


def test_a_loss_and_a_duplicate_do_not_cancel_each_other(two: list[History]) -> None:
    table = table_of(*two)
    table[int(keys_of(SHAPE, 0, 1)[0])] += 1
    table[int(keys_of(SHAPE, 0, 1)[1])] -= 1
    verdict = judged(two, table)
    assert (verdict.verdict, verdict.lost, verdict.duplicated) == ("false", 1, 1)


def test_a_row_that_is_no_sum_of_updates_is_found(two: list[History]) -> None:
    table = table_of(*two)
    table[9, 2] += 1
    assert judged(two, table).torn == 1
    table = table_of(*two)
    table[9] += 0.5
    assert judged(two, table).torn >= 1


@pytest.mark.parametrize("applied", ["none", "all", "some slots"])
def test_a_push_of_unknown_outcome_counts_0_or_1_in_each_slot(applied: str) -> None:
    histories = [history(0, *"aaaa"), history(1, *"aauu")]
    table = table_of(*histories)
    for sequence in (2, 3):
        keys = keys_of(SHAPE, 1, sequence)
        if applied == "all":
            table[keys] += 1
        elif applied == "some slots":
            table[keys[SLOT_OF_KEY[keys] % 2 == sequence % 2]] += 1
    verdict = judged(histories, table)
    assert (verdict.verdict, verdict.why) == ("true", [])
    assert verdict.unknown_outcome == 2


def test_a_push_of_unknown_outcome_may_not_count_twice() -> None:
    histories = [history(0, *"aaau")]
    table = table_of(*histories)
    keys = keys_of(SHAPE, 0, 3)
    table[keys] += 2
    verdict = judged(histories, table)
    assert (verdict.verdict, verdict.duplicated) == ("false", len(keys))


def test_half_a_slot_of_a_push_of_unknown_outcome_is_found() -> None:
    outcomes = "a" * (LARGE_EVERY - 1) + "u"
    histories = [history(0, *outcomes)]
    table = table_of(*histories)
    # The large push has all keys: those of one slot, but for one key.
    keys = np.flatnonzero(SLOT_OF_KEY == 3)
    table[keys[1:]] += 1
    verdict = judged(histories, table)
    assert (verdict.verdict, verdict.torn, verdict.lost) == ("false", 1, 0)


def test_many_overlapping_pushes_of_unknown_outcome_are_told_apart() -> None:
    histories = [history(stream, *"aauuuu") for stream in range(6)]
    table = table_of(*histories)
    draw = np.random.default_rng(1)
    for stream in range(6):
        for sequence in range(2, 6):
            keys = keys_of(SHAPE, stream, sequence)
            table[keys[np.isin(SLOT_OF_KEY[keys], np.flatnonzero(draw.random(SLOTS) < 0.5))]] += 1
    assert judged(histories, table).verdict == "true"
    table[keys_of(SHAPE, 0, 0)] -= 1
    assert judged(histories, table).lost > 0


def test_replicas_that_differ_are_found(two: list[History]) -> None:
    for wrong in (
        Copy("ps-1", 4, 3, 40, 0xABD),
        Copy("ps-1", 4, 3, 41, 0xABC),
        Copy("ps-1", 4, 2, 40, 0xABC),
    ):
        copies = equal_copies()
        copies[4][1] = wrong
        verdict = judged(two, table_of(*two), copies)
        assert (verdict.verdict, verdict.unequal) == ("false", 1)
    copies = equal_copies()
    del copies[4][1]
    assert judged(two, table_of(*two), copies).verdict == "false"


def test_a_stale_read_is_false(two: list[History]) -> None:
    two[0].stale.append("stream 0, key 3: read 1, acknowledged 2")
    assert judged(two, table_of(*two)).verdict == "false"


def test_without_evidence_the_verdict_is_unknown(two: list[History]) -> None:
    assert judged(two, None).verdict == "unknown"
    assert judge(two, table_of(*two), SLOT_OF_KEY, None, 2).verdict == "unknown"
    nothing = [history(0, *"nn")]
    assert judged(nothing, table_of(*nothing)).verdict == "unknown"


def test_a_finding_outweighs_missing_evidence(two: list[History]) -> None:
    table = table_of(*two)
    table[keys_of(SHAPE, 1, 4)] -= 1
    assert judge(two, table, SLOT_OF_KEY, None, 2).verdict == "false"


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "h"
    writer = Writer(path, 3, SHAPE)
    for sequence in range(4):
        writer.begun(sequence, keys_of(SHAPE, 3, sequence))
    writer.ended(0, "acknowledged")
    writer.ended(1, "not_applied", "ServerUnavailable: nobody\nanswers")
    writer.ended(2, "unknown")
    writer.read(12)
    writer.stale(7, 1.0, 2)
    read = parse(path.read_text())
    assert read is not None
    # The last one was under way when the trainer was killed.
    assert [push.outcome for push in read.pushes.values()] == [
        *("acknowledged", "not_applied", "unknown", "unknown")
    ]
    assert read.pushes[1].why == "ServerUnavailable: nobody answers"
    assert (read.reads, len(read.stale), read.ended) == (1, 1, False)
    writer.close()
    ended = parse(path.read_text())
    assert ended is not None
    assert ended.ended


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "h"
    writer = Writer(path, 0, SHAPE)
    assert parse("") is None
    writer.begun(0, keys_of(SHAPE, 0, 0))
    writer.ended(0, "acknowledged")
    writer.close()
    text = path.read_text()
    cut = parse(text[: text.index("\na ") + 5])
    assert cut is not None
    assert cut.pushes[0].outcome == "unknown"


def test_a_history_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h"
    writer = Writer(path, 0, SHAPE)
    writer.begun(0, keys_of(SHAPE, 0, 1))
    writer.close()
    with pytest.raises(ValueError, match="other keys in push 0"):
        parse(path.read_text())


def test_failover_is_counted_by_kind() -> None:
    struck = [Struck("kill", 0, 1, 2, float(ms), 1.0) for ms in range(1, 51)]
    struck.append(Struck("pause", 0, 1, 2, 3000.0, 1.0))
    assert failover_figures(struck) == {
        "kill": {"count": 50, "p50": 26.0, "p99": 50.0, "max": 50.0},
        "pause": {"count": 1, "p50": 3000.0, "p99": 3000.0, "max": 3000.0},
    }


def test_throughput_is_told_by_phase() -> None:
    second = 1_000_000_000
    # 20 a second, for ten seconds; none in the first half second of the fault.
    ends = [second + n * second // 20 for n in range(200)]
    ends = [end for end in ends if not 4 * second <= end < 4.5 * second]
    pushes = {n: Push(0, n, end - 5, "acknowledged", end) for n, end in enumerate(ends)}
    struck = [Struck("kill", 4 * second, 5 * second, 6 * second, 500.0, 1.0)]
    figures = throughput([History(0, SHAPE, pushes)], struck)
    assert figures["before"]["per_s"] == 20.0
    assert figures["during"] == {"per_s": 10.0, "grains": 10, "empty_grains": 5}
    assert figures["repair"]["per_s"] == 20.0
    assert figures["after"]["empty_grains"] == 0


def checked(
    histories: list[History], rows: NDArray[np.float32], *complaints: str, ended_ns: int = 5
) -> Verdict:
    """Judge a checkpoint that was asked for at 3 and whole at 5; pushes last from 1 to 2."""
    result = judged(histories, table_of(*histories))
    assert result.verdict == "true"
    judge_checkpoints(result, histories, complaints, SavedTable("ckpt", 3, ended_ns, rows))
    return result


def test_a_checkpoint_has_what_was_acknowledged_before_it(two: list[History]) -> None:
    result = checked(two, table_of(*two))
    assert (result.verdict, result.checkpoint_faults) == ("true", 0)
    rows = table_of(*two)
    key = int(keys_of(SHAPE, 0, 0)[0])
    rows[key] -= 1
    result = checked(two, rows)
    assert (result.verdict, result.checkpoint_faults) == ("false", 1)
    assert f"ckpt, key {key}:" in result.why[0]


def test_a_checkpoint_may_have_what_was_under_way_and_nothing_later(two: list[History]) -> None:
    push = two[0].pushes[3]
    keys = keys_of(SHAPE, 0, 3)
    for begun_ns, good in ((4, True), (6, False)):
        push.begun_ns, push.ended_ns = begun_ns, begun_ns + 1
        rows = table_of(*two)
        assert (checked(two, rows).verdict == "true") == good
        # It need not be in it.
        rows[keys] -= 1
        assert checked(two, rows).verdict == "true"


def test_a_damaged_checkpoint_makes_the_verdict_false(two: list[History]) -> None:
    result = checked(two, table_of(*two), "ckpt/part-0: wrong checksum")
    assert (result.verdict, result.checkpoint_faults) == ("false", 1)
    assert result.why[0] == "ckpt/part-0: wrong checksum"
