"""What the experiments decide and reckon without a cluster: plans, figures, tables and plots."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from backstay.kubernetes.manifest import objects_of
from backstay.master.job_file import load_job
from bench.experiments.job_files import FIRST_BATCH, MODEL, JobShape, job_settings, paced_model
from bench.experiments.outcome import (
    TARGETS,
    Outcome,
    auc_curve,
    document,
    gave_way_and_came_back,
    longest_pause,
    share_in_use,
    spread_of_ends,
    table,
)
from bench.experiments.place import thousandths
from bench.experiments.plan import (
    FAULTS,
    LoadCurve,
    Shares,
    faults_of,
    replicas_for,
    shares_of,
    worker_counts,
)
from bench.experiments.plot import Line, svg, ticks
from bench.experiments.run import Sizes, parse_arguments

pytestmark = pytest.mark.gates

NUMBERS = sorted(TARGETS)


# -- plans -----------------------------------------------------------------------------------


def test_a_job_asks_for_13_of_24_parts() -> None:
    shares = shares_of([2000, 2000])
    assert shares == Shares(166)
    assert shares.job_parts == 13
    assert (shares.small, shares.large) == ("166m", "332m")
    # Each node has room for its whole half.
    assert 12 * shares.part_m <= 2000


@pytest.mark.parametrize("nodes", [[], [1000] * 5])
def test_nodes_that_cannot_share_24_parts_are_refused(nodes: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot share 24 parts"):
        shares_of(nodes)


@pytest.mark.parametrize(("quantity", "expected"), [("158m", 158), ("2", 2000), ("0.5", 500)])
def test_an_amount_of_cpu_is_read(quantity: str, expected: int) -> None:
    assert thousandths(quantity) == expected


def test_the_load_goes_from_its_least_to_its_most_and_back() -> None:
    curve = LoadCurve(2.0, 10.0, 60.0)
    assert [curve.rate(at_s) for at_s in (0, 30, 60)] == pytest.approx([2.0, 10.0, 2.0])
    assert all(2.0 <= curve.rate(at_s) <= 10.0 for at_s in range(120))


@pytest.mark.parametrize(
    ("rate", "now", "wanted"),
    [
        (4.0, 1, 1),
        # Within a tenth.
        (4.3, 1, 1),
        (4.5, 1, 2),
        (7.3, 2, 2),
        (7.1, 3, 2),
        (100.0, 2, 5),
        (0.1, 3, 1),
        (9.0, 0, 3),
    ],
)
def test_nginx_follows_its_load_within_limits(rate: float, now: int, wanted: int) -> None:
    assert replicas_for(rate, per_replica=4.0, now=now, least=1, most=5) == wanted


def test_faults_are_drawn_from_the_seed_every_ten_seconds() -> None:
    plan = faults_of(7, every_s=10.0, for_s=600.0)
    assert plan == faults_of(7, every_s=10.0, for_s=600.0)
    assert plan != faults_of(8, every_s=10.0, for_s=600.0)
    assert [at_s for at_s, _ in plan] == [10.0 * number for number in range(1, 61)]
    assert {kind for _, kind in plan} == set(FAULTS)


def test_each_drawn_number_of_workers_differs_from_the_one_before() -> None:
    plan = worker_counts(3, least=4, most=8, every_s=10.0, for_s=300.0)
    assert plan == worker_counts(3, least=4, most=8, every_s=10.0, for_s=300.0)
    counts = [count for _, count in plan]
    assert len(counts) == 30
    assert set(counts) <= set(range(4, 9))
    assert all(one != two for one, two in pairwise(counts))


# -- figures ---------------------------------------------------------------------------------


def test_use_is_weighed_by_time() -> None:
    samples = [(0.0, 4.0), (1.0, 2.0), (4.0, 4.0), (5.0, 0.0)]
    assert share_in_use(samples, 4.0) == pytest.approx((4 + 6 + 4) / 5 / 4)


@pytest.mark.parametrize("samples", [[], [(1.0, 2.0)], [(1.0, 2.0), (1.0, 3.0)]])
def test_use_over_no_time_is_refused(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="two samples at two times"):
        share_in_use(samples, 4.0)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([0, 4, 2, 4], True),
        ([4, 2, 3], False),
        ([2, 4, 4], False),
        ([0, 0], False),
        ([], False),
    ],
)
def test_training_that_gives_way_comes_back_to_its_height(
    workers: list[float], expected: bool
) -> None:
    assert gave_way_and_came_back(workers) is expected


def test_the_longest_pause_lies_between_two_changes() -> None:
    assert longest_pause([(0, 0), (2, 0), (3, 5), (4, 5), (9, 5), (10, 9), (30, 9)]) == 7
    assert longest_pause([(0, 1)]) == 0
    # A job that goes back to a checkpoint has not gone on until it is beyond that.
    assert longest_pause([(0, 5), (1, 3), (4, 6)]) == 4


def test_curves_are_in_order_of_steps_and_compared_at_their_ends() -> None:
    told = [
        SimpleNamespace(steps=20, metrics={"auc": 0.9}),
        SimpleNamespace(steps=10, metrics={"auc": 0.8}),
        SimpleNamespace(steps=15, metrics={"loss": 1.0}),
    ]
    curve = auc_curve(told)
    assert curve == ((10.0, 0.8), (20.0, 0.9))
    assert spread_of_ends({"a": curve, "b": [(5.0, 0.93)]}) == pytest.approx(0.03)


def test_the_table_says_what_was_not_measured() -> None:
    text = table({1: Outcome({"elastic_over_gangs": 0.7})}, [1])
    rows = text.splitlines()[2:]
    assert rows[0].endswith("| <= 0.73 | 0.7 | met |")
    assert rows[1].endswith("| <= 10 | not measured | not measured |")


def test_the_document_holds_everything() -> None:
    outcome = Outcome({"auc_spread": 0.01}, {"changes": 3})
    text = document({3: outcome}, "a machine", quick=True, seed=4, failures=["1: no"])
    assert json.loads(text) == {
        "machine": "a machine",
        "quick": True,
        "seed": 4,
        "failures": ["1: no"],
        "experiments": {"3": {"figures": {"auc_spread": 0.01}, "details": {"changes": 3}}},
    }


# -- plots -----------------------------------------------------------------------------------


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.0, 10.0) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert ticks(0.913, 0.921) == [0.914, 0.916, 0.918, 0.92]
    assert ticks(3.0, 3.0) == [3.0]


def test_a_plot_is_whole_svg_with_every_line() -> None:
    lines = [
        Line("a < b", ((0.0, 1.0), (1.0, 2.0))),
        Line("steps", ((0.0, 0.0), (2.0, 4.0)), steps=True, dashed=True),
        Line("none", ()),
    ]
    text = svg("title & more", "seconds", "CPUs", lines, y_from=0.0)
    root = ElementTree.fromstring(text)  # ours, not a stranger's
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"title & more", "seconds", "CPUs", "a < b", "steps", "none"} <= set(texts)
    assert text.count("stroke-dasharray") == 1


def test_a_long_line_keeps_its_last_point() -> None:
    many = tuple((float(number), float(number % 7)) for number in range(10_000))
    text = svg("t", "x", "y", [Line("many", many)])
    assert len(text) < 30_000
    # The right border: where the last point is.
    assert "L704.0 " in text


def test_a_plot_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="has no points"):
        svg("empty", "x", "y", [])


# -- the command line ------------------------------------------------------------------------


def test_every_experiment_has_a_number_targets_and_sizes() -> None:
    assert NUMBERS == [1, 2, 3, 4]
    assert sorted(Sizes().experiments()) == sorted(Sizes.quick().experiments()) == NUMBERS
    assert parse_arguments([]).only == NUMBERS
    assert parse_arguments(["--only", "2", "4", "--quick"]).only == [2, 4]


def test_an_unknown_experiment_is_refused() -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--only", "5"])


# -- the files of a job ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        JobShape("short", workers=5),
        JobShape(
            "long",
            workers=4,
            passes=5,
            saves=True,
            evaluation_every_steps=10,
            requests={"worker": {"cpu": "332m"}},
            priorities={"worker": "training"},
        ),
    ],
)
def test_a_job_file_is_one_that_backstay_takes(shape: JobShape, tmp_path: Path) -> None:
    settings = job_settings(shape, "10.0.0.1:2379", tmp_path, tmp_path)
    (tmp_path / MODEL).write_text(paced_model(0.1), encoding="utf-8")
    (tmp_path / "job.yaml").write_text(json.dumps(settings), encoding="utf-8")
    spec = load_job(tmp_path / "job.yaml", {}, folder=tmp_path)
    objects = objects_of(spec)
    assert objects.servers is not None
    assert spec.workers.initial == shape.workers


def test_a_paced_model_is_python_that_tells_its_first_batch() -> None:
    text = paced_model(0.25)
    compile(text, MODEL, "exec")
    assert "time.sleep(0.25)" in text
    assert f'print(f"{FIRST_BATCH}{{time.time():.3f}}"' in text
