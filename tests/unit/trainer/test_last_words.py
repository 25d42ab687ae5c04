"""What a worker's process leaves behind when it fails."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest

from backstay.errors import BackstayError, ConfigError, ServerUnavailable, TableConflict
from backstay.kubernetes.objects import LAST_WORDS_VARIABLE
from backstay.trainer.worker import cli
from backstay.trainer.worker.last_words import BYTES_MAX, VARIABLE


class Failing:
    """A worker whose run fails."""

    error: BaseException = ValueError("a fault of the user")

    def __init__(self, *_: object, **__: object) -> None:
        """It connects to nothing."""

    def run(self) -> str:
        raise self.error


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file for the last words of a worker that fails."""
    path = tmp_path / "termination-log"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr(cli, "Worker", Failing)
    monkeypatch.setattr(cli, "reach", lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return path


def run() -> int:
    return cli.run("127.0.0.1:1", "census", "w-0", {})


def test_the_launcher_of_pods_and_the_worker_name_one_variable() -> None:
    assert LAST_WORDS_VARIABLE == VARIABLE


def test_an_error_of_the_users_code_leaves_its_traceback(words: Path) -> None:
    with pytest.raises(ValueError, match="a fault of the user"):
        run()
    told = words.read_text(encoding="utf-8")
    assert told.startswith("Traceback (most recent call last):\n")
    assert "raise self.error" in told
    assert told.endswith("ValueError: a fault of the user\n")


def test_a_message_that_is_no_text_hides_no_error(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "error", ValueError("the file \udcff" + 5000 * "x"))
    with pytest.raises(ValueError, match="the file"):
        run()
    assert "ValueError: the file ?xxx" in words.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("model: it is wrong"), 2, "model: it is wrong"),
        (
            TableConflict("dim is 4, not 8"),
            2,
            "dim is 4, not 8; give the model the old settings, or the job another name",
        ),
        (ServerUnavailable("no answer"), 1, "ServerUnavailable: no answer"),
    ],
)
def test_an_error_of_ours_leaves_its_message(
    words: Path,
    error: BackstayError,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Failing, "error", error)
    assert run() == code
    assert words.read_text(encoding="utf-8") == told
    assert caplog.messages[-1] == told


def test_no_more_is_left_than_kubernetes_keeps(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ConfigError("model: begin\n" + "line\n" * 2000 + "ValueError: end")
    monkeypatch.setattr(Failing, "error", error)
    run()
    told = words.read_bytes()
    assert len(told) <= BYTES_MAX
    assert told.startswith(b"model: begin\n")
    assert told.endswith(b"ValueError: end")


def test_a_file_that_cannot_be_written_hides_no_error(
    words: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Failing, "error", ConfigError("model: it is wrong"))
    monkeypatch.setenv(VARIABLE, str(words / "nowhere"))
    caplog.set_level(logging.WARNING)
    assert run() == 2
    assert "are in its log only" in caplog.messages[0]
    # The node shows the end of the log then.
    assert caplog.messages[-1] == "model: it is wrong"


def test_elsewhere_nothing_is_written(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ValueError, match="a fault of the user"):
        run()
    assert not words.exists()
