"""Tracebacks of a limited size: what stays, and what is said to be left out."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backstay.job import tracebacks
from backstay.job.tracebacks import HEADER, cut_middle, frames_within, traceback_within

BYTES_MAX = 4096


def raised(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (any)
        call()
    return caught.value


def module(path: Path, text: str) -> dict[str, Any]:
    """What a file of Python defines; its frames are those of the file."""
    path.write_text(text, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), names)
    return names


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function of a library that fails so many frames, all unlike each other, below it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    steps = "\n".join(
        f"def step_{n}(left):\n    return fail(left - 1, 'a long name of a setting')"
        for n in range(9)
    )
    text = (
        f"{steps}\ndef fail(left, _=''):\n"
        "    if not left:\n        raise ValueError('of shape 3')\n"
        "    return globals()[f'step_{left % 9}'](left)\n"
    )
    monkeypatch.setattr(tracebacks, "_LIBRARIES", (f"{folder}/",))
    fail: Callable[[int], None] = module(folder / "deep.py", text)["fail"]
    return fail


def test_a_traceback_that_fits_is_shown_as_python_shows_it() -> None:
    def fail() -> None:
        try:
            int("x")
        except ValueError as error:
            raise KeyError("no such column") from error

    error = raised(fail)
    assert traceback_within(error, BYTES_MAX) == "".join(traceback.format_exception(error))


def test_frames_of_libraries_go_first(tmp_path: Path, library: Callable[[int], None]) -> None:
    user = module(
        tmp_path / "model.py",
        "def forward(fail):\n    return helper(fail)\ndef helper(fail):\n    return fail(100)\n",
    )
    error = raised(lambda: user["forward"](library))
    assert len("".join(traceback.format_exception(error)).encode()) > 2 * BYTES_MAX
    text = traceback_within(error, BYTES_MAX)
    assert len(text.encode()) <= BYTES_MAX
    assert text.startswith(HEADER)
    for own in ("return helper(fail)", "return fail(100)", "raised(lambda:"):
        assert own in text
    assert "frames left out]\n" in text
    # Where it was raised, and the error.
    assert text.endswith("raise ValueError('of shape 3')\nValueError: of shape 3\n")
    # As much as fits is shown.
    assert len(text.encode()) > BYTES_MAX - 500


def test_of_too_many_frames_of_the_user_those_in_the_middle_go(tmp_path: Path) -> None:
    text = "\n".join(f"def step_{n}():\n    return step_{n + 1}()" for n in range(300))
    user = module(tmp_path / "model.py", f"{text}\ndef step_300():\n    raise OSError('away')\n")
    text = traceback_within(raised(user["step_0"]), BYTES_MAX)
    assert len(text.encode()) <= BYTES_MAX
    assert "return step_1()" in text
    assert "return step_300()" in text
    assert "return step_150()" not in text
    assert text.endswith("OSError: away\n")


def test_an_endless_recursion_fits_as_python_shows_it(tmp_path: Path) -> None:
    user = module(tmp_path / "model.py", "def again():\n    return again()\n")
    text = traceback_within(raised(user["again"]), BYTES_MAX)
    assert "[Previous line repeated" in text
    assert "left out" not in text
    assert "RecursionError" in text.splitlines()[-1]


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    def fail() -> None:
        raise ValueError("begin " + "ä" * 5000 + " end")

    text = traceback_within(raised(fail), BYTES_MAX)
    assert len(text.encode()) <= BYTES_MAX
    assert text.startswith(HEADER)
    assert "ValueError: begin ä" in text
    assert "\n[...]\n" in text
    assert text.endswith("ä end\n")
    assert cut_middle("as it is", BYTES_MAX) == "as it is"


def test_frames_that_a_size_of_ones_own_limits(tmp_path: Path) -> None:
    text = "\n".join(f"def step_{n}():\n    return step_{n + 1}()" for n in range(60))
    user = module(tmp_path / "model.py", f"{text}\ndef step_60():\n    raise OSError('away')\n")
    frames = traceback.extract_tb(raised(user["step_0"]).__traceback__)
    told = frames_within(list(frames), 30, lambda one: one.count("\n"))
    assert told.count("\n") <= 30
    assert "in step_0" in told
    assert "raise OSError" in told
