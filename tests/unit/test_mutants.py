"""The program that plants faults: what it says of one that is caught, missed, stale or broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutants.faults import Fault, chosen, read_faults
from tools.mutants.trial import Trials, copy_project

pytestmark = pytest.mark.gates

CODE = "def least(a: int, b: int) -> int:\n    return a if a < b else b\n"
TESTS = """import code_under_test as code

def test_the_least() -> None:
    assert code.least(1, 2) == 1

def test_that_is_red() -> None:
    assert code.least(2, 1) == 2
"""


def fault(name: str, before: str, after: str, test: str = "test_code.py") -> Fault:
    return Fault("area", name, "", "src/code_under_test.py", before, after, pytest=(test,))


def test_a_fault_is_caught_only_by_a_test_that_passes_without_it(tmp_path: Path) -> None:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "code_under_test.py").write_text(CODE)
    (root / "test_code.py").write_text(TESTS.partition("def test_that_is_red")[0])
    (root / "test_red.py").write_text(TESTS.replace("the_least", "that_is_green"))
    copy_project(root, tmp_path / "copy")
    trials = Trials(tmp_path / "copy", tmp_path / "target", limit_s=60)
    faults = [
        fault("the other one", "a < b", "a > b"),
        fault("of equal ones the other", "a < b", "a <= b"),
        fault("gone from the code", "a == b", "a > b"),
        fault("in more than one place", "b", "a"),
        fault("noticed by a red test", "a < b", "a <= b", "test_red.py"),
        fault("without a test", "a < b", "a > b", "test_none.py"),
    ]
    results = trials.confirmed([trials.of(one) for one in faults])
    verdicts = ["caught", "missed", "stale", "stale", "broken", "broken"]
    assert [one.verdict for one in results] == verdicts
    assert results[0].noticed == "test_code.py::test_the_least"
    assert (root / "src" / "code_under_test.py").read_text() == CODE
    assert (tmp_path / "copy" / "src" / "code_under_test.py").read_text() == CODE


def test_a_share_is_the_same_for_the_same_seed() -> None:
    faults = read_faults()
    tenth = chosen(faults, "", 0.1, "1")
    assert tenth == chosen(faults, "", 0.1, "1") != chosen(faults, "", 0.1, "2")
    assert len(tenth) == round(len(faults) / 10)
    assert {one.area for one in chosen(faults, "controller:", 1.0, "")} == {"controller"}
