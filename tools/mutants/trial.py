"""Faults on trial: each is planted in a copy of the project, whose tests then should fail.

The working tree is only read. What runs in the copy is started here, and ended here.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tools.mutants.faults import Fault, why_stale

__all__ = ["LIMIT_S", "Result", "Trials", "Verdict", "copy_project"]

Verdict = Literal["caught", "missed", "stale", "broken"]

# None of these belongs to the sources. The binding (src/backstay/*.so) is copied.
LEFT_OUT = (".git", ".venv", "target", "build", "dist", "site", "__pycache__", ".*_cache")
PLUGIN_FOLDER = Path(__file__).parent / "plugin"
MARKERS = "not slow and not chaos and not kubernetes"
PYTEST_FAILED = 1
NO_TESTS = 5
# Tests that hang for this long have noticed the fault.
LIMIT_S = 240.0
# A test that failed, as pytest and as cargo print it.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$|^    (\w+(?:::\w+)*)$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What came of a fault.

    Attributes:
        fault: Which.
        verdict: ``caught`` or ``missed`` by its tests. ``stale``: its text is not in the file.
            ``broken``: nothing can be said, for its tests fail without it, do not exist or do not
            compile.
        detail: What is wrong.
        noticed: The test that failed.
        seconds: How long it took.
    """

    fault: Fault
    verdict: Verdict
    detail: str = ""
    noticed: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class _Run:
    status: int | None
    output: str
    failed: tuple[str, ...] = ()

    @property
    def last_lines(self) -> str:
        return " / ".join(self.output.strip().splitlines()[-3:])[:300]


def copy_project(root: Path, copy: Path) -> None:
    """Copy the sources and the binding of a project."""
    shutil.rmtree(copy, ignore_errors=True)
    # Cargo takes an older file for one that it has compiled, maybe with a fault: all are new here.
    shutil.copytree(
        root,
        copy,
        symlinks=True,
        ignore=shutil.ignore_patterns(*LEFT_OUT),
        copy_function=shutil.copyfile,
    )
    if (root / ".venv").exists():
        (copy / ".venv").symlink_to(root / ".venv")


class Trials:
    """Plants faults in a copy of the project and runs their tests there.

    Args:
        copy: The copy.
        target: Cargo's folder.
        limit_s: For the tests of one fault.
    """

    def __init__(self, copy: Path, target: Path, limit_s: float = LIMIT_S) -> None:
        self._copy = copy
        self._target = target
        self._limit_s = limit_s

    def of(self, fault: Fault) -> Result:
        """Plant a fault, run its tests, and put the file right again."""
        begun_s = time.monotonic()
        if why := why_stale(fault, self._copy):
            return Result(fault, "stale", why)
        path = self._copy / fault.file
        right = path.read_text(encoding="utf-8")
        _write(path, right.replace(fault.before, fault.after))
        try:
            found = self._pytest(fault) if fault.pytest else self._cargo(fault)
        finally:
            _write(path, right)
        if found.verdict == "caught" and not found.noticed:
            # A slow machine is no fault.
            again = self._pytest(fault) if fault.pytest else self._cargo(fault)
            if again.verdict != "missed":
                found = replace(again, verdict="broken", detail=f"without it: {again.detail}")
        return replace(found, seconds=time.monotonic() - begun_s)

    def confirmed(self, results: Sequence[Result]) -> list[Result]:
        """Return the results; where a test fails without the fault, too, it has noticed nothing."""
        noticed = [one for one in results if one.noticed]
        fails: set[tuple[tuple[str, ...], str]] = set()
        for cargo in {one.fault.cargo for one in noticed}:
            tests = sorted({one.noticed for one in noticed if one.fault.cargo == cargo})
            words = self._cargo_words(cargo, "--", "--exact", *tests)
            run = self._run(words if cargo else [*_PYTEST, *tests], 10 * self._limit_s)
            if run.status:
                fails |= {(cargo, test) for test in (run.failed or tests)}
        return [
            replace(one, verdict="broken", detail=f"{one.noticed} fails without the fault")
            if (one.fault.cargo, one.noticed) in fails
            else one
            for one in results
        ]

    def _pytest(self, fault: Fault) -> Result:
        tests: list[str] = []
        for pattern in fault.pytest:
            found = sorted(str(one.relative_to(self._copy)) for one in self._copy.glob(pattern))
            if not found:
                return Result(fault, "broken", f"there are no tests {pattern}")
            tests += found
        run = self._run([*_PYTEST, "-x", *tests], self._limit_s)
        if run.status not in (0, None, PYTEST_FAILED):
            return Result(fault, "broken", f"no test has failed: {run.last_lines}")
        return self._result(fault, run)

    def _cargo(self, fault: Fault) -> Result:
        built = self._run(self._cargo_words(fault.cargo, "--no-run"), 5 * self._limit_s)
        if built.status != 0:
            return Result(fault, "broken", f"it does not compile: {built.last_lines}")
        return self._result(fault, self._run(self._cargo_words(fault.cargo), self._limit_s))

    def _result(self, fault: Fault, run: _Run) -> Result:
        if run.status is None:
            return Result(fault, "caught", f"no end after {self._limit_s:g} s")
        if run.status == 0:
            return Result(fault, "missed")
        if not run.failed:
            return Result(fault, "broken", f"no test has failed: {run.last_lines}")
        return Result(fault, "caught", noticed=run.failed[0])

    @staticmethod
    def _cargo_words(cargo: Iterable[str], *more: str) -> list[str]:
        return [os.environ.get("CARGO", "cargo"), "test", "--quiet", *cargo, *more]

    def _run(self, words: list[str], limit_s: float) -> _Run:
        """Run a command in the copy; the status is None if it had to be ended."""
        environment = {
            **os.environ,
            "CARGO_TARGET_DIR": str(self._target),
            # The same examples and the same order of sets each time.
            "CI": "true",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(map(str, (self._copy / "src", PLUGIN_FOLDER))),
            "PROPTEST_MAX_SHRINK_ITERS": "0",
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        process = subprocess.Popen(
            words,
            cwd=self._copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return _Run(None, "")
        finally:
            # What the tests have started ends with them.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        failed = tuple(python or rust for python, rust in _FAILED.findall(output))
        return _Run(process.returncode, output, failed)


_PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", MARKERS]
_PYTEST += ["-p", "no:cacheprovider", "-p", "no_shrinking"]


def _write(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8")
    # Python tells a file by its length and the whole second in which it was written.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
