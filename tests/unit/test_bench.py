"""The benchmark's arithmetic: ratios, medians, verdicts, order of running, the JSON line."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from bench.figures import (
    TARGETS,
    Spread,
    Target,
    bench_line,
    format_table,
    interleave,
    ratio,
    spread,
    verdict,
)
from bench.groups import GROUPS, Group, Ratio, Sizes
from bench.jobs.disk import BLOCK_BYTES, read_bytes_per_s, write_bytes_per_s
from bench.jobs.kept_runs import Case, Found, Runs
from bench.jobs.pushes import PushTimes, TimedPush, rows_of
from bench.jobs.resize import fewest_bytes
from bench.programs import ProgramFailed, Unavailable, Workshop, run_program
from bench.run import commands_of, figures_of, main, run_group

pytestmark = pytest.mark.gates

AT_LEAST = Target("speed", "speed over the other's", 0.7)
AT_MOST = Target("memory", "bytes over payload", 1.3, at_most=True)


def one(value: float) -> Spread:
    return Spread(value, value, value, 1)


def test_a_ratio_is_taken_within_a_round_before_the_median() -> None:
    # The second round met a machine of half the speed: the ratio does not see it.
    assert ratio([8.0, 4.0, 9.0], [10.0, 5.0, 10.0]) == Spread(0.8, 0.8, 0.9, 3)


def test_a_ratio_of_unpaired_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rounds against 2"):
        ratio([1.0, 2.0, 3.0], [1.0, 2.0])


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one round"):
        spread([])


def test_one_bad_round_does_not_move_the_median() -> None:
    assert spread([1.0, 1.1, 0.1, 1.2, 1.05]) == Spread(1.05, 0.1, 1.2, 5)


@pytest.mark.parametrize(
    ("target", "value", "expected"),
    [
        (AT_LEAST, one(0.7), "met"),
        (AT_LEAST, one(0.699), "missed"),
        (AT_MOST, one(1.3), "met"),
        (AT_MOST, one(1.301), "missed"),
        (AT_MOST, None, "not measured"),
    ],
)
def test_verdict(target: Target, value: Spread | None, expected: str) -> None:
    assert verdict(target, value) == expected


def test_the_verdict_goes_by_the_median() -> None:
    assert verdict(AT_LEAST, Spread(0.71, 0.1, 0.9, 5)) == "met"


def test_each_round_holds_everyone_once_in_rotated_order() -> None:
    assert interleave(["a", "b", "c"], 4) == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_the_table_says_what_is_met_missed_and_not_measured() -> None:
    table = format_table(
        {"speed": Spread(0.75, 0.5, 0.8, 5), "memory": one(1.4)},
        [AT_LEAST, AT_MOST, Target("other", "nobody ran it", 2.0)],
    )
    header, rule, speed, memory, other = table.splitlines()
    assert len({len(line) for line in table.splitlines()}) == 1
    assert "verdict" in header
    assert set(rule) <= set("|- ")
    assert ">= 0.7" in speed
    assert "0.50 to 0.80" in speed
    assert "met" in speed
    assert "<= 1.3" in memory
    assert "missed" in memory
    assert "not measured" in other


def test_the_last_line_is_json_by_name() -> None:
    word, text = bench_line({"speed": Spread(0.123456789, 0, 1, 5)}).split(" ", 1)
    assert word == "BENCH"
    assert json.loads(text) == {"speed": 0.12346}


def test_every_target_is_measured_by_one_group() -> None:
    measured = [wanted.name for group in GROUPS.values() for wanted in group.ratios]
    assert len(measured) == len(set(measured))
    assert {target.name for target in TARGETS} <= set(measured)


@pytest.mark.parametrize("name", GROUPS)
def test_figures_are_made_of_contestants_that_exist(name: str) -> None:
    group = GROUPS[name]
    named = {wanted.above for wanted in group.ratios} | {who for who, _ in group.raw}
    named |= {wanted.below for wanted in group.ratios if wanted.below}
    assert named <= set(group.contestants)


def printing(figures: dict[str, float]) -> list[str]:
    return [sys.executable, "-c", f"print('noise'); print({json.dumps(json.dumps(figures))})"]


def test_a_program_prints_its_figures_last() -> None:
    assert run_program(printing({"keys_per_s": 5.0})) == {"keys_per_s": 5.0}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('out of keys')", "out of keys"),
        ("print('done')", "no JSON line"),
        ("import time; time.sleep(60)", "not done after 1 s"),
    ],
)
def test_a_failed_program_is_named_with_its_reason(code: str, message: str) -> None:
    with pytest.raises(ProgramFailed, match=message):
        run_program([sys.executable, "-c", code], deadline_s=1.0 if "sleep" in code else 30.0)


def test_a_contestant_that_fails_is_left_out_and_the_others_go_on() -> None:
    commands = {
        "good": printing({"rate": 2.0}),
        "bad": [sys.executable, "-c", "raise SystemExit(3)"],
    }
    results, failures = run_group("group", commands, rounds=2)
    assert results == {"good": [{"rate": 2.0}] * 2}
    assert len(failures) == 1
    assert "bad is left out" in failures[0]


def test_a_missing_contestant_takes_its_ratios_along_and_nothing_else() -> None:
    def absent(workshop: Workshop, sizes: Sizes) -> list[str]:
        raise Unavailable("no wheel for this machine")

    group = Group(
        contestants={"us": lambda *_: ["us"], "them": lambda *_: ["them"], "paddle": absent},
        ratios=(Ratio("over_them", "us", "them", "rate"), Ratio("over_p", "us", "paddle", "rate")),
        raw=(("us", "rate"), ("paddle", "rate")),
    )
    commands, missing = commands_of(group, Workshop(Path()), Sizes(), peers=True)
    assert list(commands) == ["us", "them"]
    assert missing == ["paddle is left out: no wheel for this machine"]
    ratios, raw = figures_of("g", group, {"us": [{"rate": 3.0}], "them": [{"rate": 2.0}]})
    assert ratios == {"over_them": one(1.5)}
    assert raw == {"g_us_rate": one(3.0)}


def test_without_peers_none_is_asked_for() -> None:
    commands, missing = commands_of(GROUPS["zipf"], Workshop(Path()), Sizes(), peers=False)
    assert list(commands) == ["backstay"]
    assert missing == []


@pytest.mark.parametrize("words", [["--only", "weather"], ["--rounds", "0"]])
def test_wrong_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "error:" in capsys.readouterr().err


# At 0, 1, ... 9 s, and the longer the later; the one of 5 s takes long.
PUSHES = PushTimes(
    [
        TimedPush(float(at), 3.5 if at == 5 else 0.1 + at / 100)
        for at in range(10)
        if at < 6 or at > 8
    ]
)


def test_pushes_count_where_they_ended() -> None:
    assert PUSHES.per_s(0.0, 5.0) == 1.0
    assert PUSHES.per_s(5.0, 8.0) == 0.0
    assert PUSHES.per_s(8.0, 10.0) == 1.0


def test_a_push_that_began_before_waited_for_what_came() -> None:
    assert PUSHES.longest_s(0.0, 5.0) == pytest.approx(0.14)
    assert PUSHES.longest_s(6.0, 7.0) == 3.5
    assert PUSHES.longest_s(8.6, 8.9) == 0.0


def test_what_waited_is_what_took_longer() -> None:
    assert PUSHES.longer_s(1.0, 0.0, 9.0) == 3.5
    assert PUSHES.longer_s(0.125, 0.0, 5.0) == pytest.approx(0.13 + 0.14)


@pytest.mark.parametrize(
    ("share", "seconds"), [(0.0, 0.1), (0.2, 0.1), (0.5, 0.12), (0.81, 0.14), (1.0, 0.14)]
)
def test_a_percentile_is_the_time_of_a_push(share: float, seconds: float) -> None:
    assert PUSHES.percentile_s(share, 0.0, 5.0) == pytest.approx(seconds)


def test_no_pushes_have_no_percentile() -> None:
    with pytest.raises(ValueError, match=r"no push was under way in 0\.300 s"):
        PUSHES.percentile_s(0.99, 8.6, 8.9)


def test_gigabytes_are_weights_state_and_keys_of_rows() -> None:
    # 16 float32 twice and 8 bytes of key.
    assert rows_of(136 * 2_000_000 / 1e9) == 2_000_000


def test_a_new_server_takes_no_more_than_its_share_of_the_slots() -> None:
    # 1,024 slots on three servers: two have 341, so that much must move.
    assert fewest_bytes(1024 * 100, 1024, 3, 1) == 34_100
    assert fewest_bytes(1024 * 100, 1024, 4, 2) == 51_200


def test_the_disk_is_measured_with_every_byte_and_left_as_it_was(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_bytes(b"x" * (BLOCK_BYTES + 1))
    assert write_bytes_per_s(tmp_path, 2 * BLOCK_BYTES + 1) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert read_bytes_per_s([kept, kept]) > 0


def test_runs_that_are_done_are_not_done_again(tmp_path: Path) -> None:
    def arguments(limit_minutes: float | None = None) -> argparse.Namespace:
        return argparse.Namespace(
            rates=[0.1, 0.1], passes=[1, 1], limit_minutes=limit_minutes, out=tmp_path
        )

    cases = [Case("census", "async", 4, seed) for seed in range(3)]
    found = [Found(0.75, 0.5, 8.0, 1.0), Found(float("nan"), float("nan"), float("nan"), 1.0)]
    done: list[Case] = []

    def measure(case: Case) -> Found:
        done.append(case)
        return found[case.seed == 2]

    assert not Runs(arguments(limit_minutes=0.0), [1]).do(cases, measure)
    assert done == []
    assert Runs(arguments(), [1]).do(cases[:1], measure)
    runs = Runs(arguments(), [1])
    assert runs.do(cases, measure)
    assert done == cases
    # What is kept is read again; one run diverged, and no mean knows of it.
    runs = Runs(arguments(), [1])
    assert runs.seeds("census", "async", 4) == {0: found[0], 1: found[0]}
    assert runs.count("census", "async", 4) == "2 (1 more diverged)"
    assert runs.count("census", "scale", 4) == ""
    assert (runs.has("census"), runs.has("frappe")) == (True, False)
    drawn = runs.points("census", "async", [4, 2], of_one="async")
    assert drawn == ((2.0, found[0].auc),), "two workers were not tried"
    assert Runs(arguments(), [2]).found == {}
