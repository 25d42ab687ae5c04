"""docs/internals/ways.md and the index name files and functions that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.gates

ROOT = Path(__file__).resolve().parents[2]
INTERNALS = ROOT / "docs" / "internals"
STEP = re.compile(r"^\d+\. `([^`]+)` (`[^`]+`(?:, `[^`]+`)*):", re.MULTILINE)
WAYS = (INTERNALS / "ways.md").read_text(encoding="utf-8")
# A row of the invariants: its number, then the tests, each as `file` `function`.
INVARIANT = re.compile(r"^\| (I\d) \|.*\| ([^|]+) \|$", re.MULTILINE)
TEST = re.compile(r"`([^` ]+\.(?:py|rs))` `([^`]+)`")
INDEX = (INTERNALS / "index.md").read_text(encoding="utf-8")


def check(path: str, names: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    for name in re.findall(r"`([^`]+)`", names):
        for part in name.split("."):
            defined = rf"\b(?:def|fn|class|struct|trait|enum) {re.escape(part)}\b"
            assert re.search(defined, text), f"{path} has no {part}"


def test_each_step_of_a_way_can_be_read() -> None:
    numbered = re.findall(r"^\d+\. ", WAYS, re.MULTILINE)
    assert len(STEP.findall(WAYS)) == len(numbered) > 0


@pytest.mark.parametrize(("path", "names"), STEP.findall(WAYS))
def test_each_step_of_a_way_is_there(path: str, names: str) -> None:
    check(path, names)


@pytest.mark.parametrize(("invariant", "tests"), INVARIANT.findall(INDEX))
def test_the_tests_of_an_invariant_name_it(invariant: str, tests: str) -> None:
    found = TEST.findall(tests)
    assert found, f"{invariant} names no test"
    for path, name in found:
        check(path, f"`{name}`")
        text = (ROOT / path).read_text(encoding="utf-8")
        at = re.search(rf"\b(?:def|fn) {re.escape(name)}\b", text)
        assert at is not None
        around = text[max(0, at.start() - 700) : at.end() + 1_000]
        assert re.search(rf"\b{invariant}\b", around), f"{path}: {name} does not name {invariant}"
