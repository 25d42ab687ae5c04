"""``backstay train`` and its like without a cluster: help, flags, exit codes, the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from backstay._proto.v1 import job_pb2
from backstay.cli import main
from backstay.config import ENDPOINT_VARIABLES
from backstay.exit_codes import JOB_CODES, JOBS_CODES, ZOO_CODES
from backstay.job_spec import DataSpec, JobSpec, ServersSpec
from backstay.runner.metrics_log import FILE_NAME, MetricsLog
from backstay.runner.outcome import Outcome
from backstay.runner.servers import chosen_servers
from backstay.runner.status_words import metrics_text, round_text, summary_lines
from backstay.trainer.worker.audit import RecordsAudit

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "cli.md"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENDPOINT_VARIABLES, "BACKSTAY_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("name: tiny\nmodel: model.py\ntraining: train.csv\n")
    return path


def command_at(*path: str) -> click.Command:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command


RUNS = [("train",), ("evaluate",), ("predict",)]
JOBS = [("jobs",), *(("jobs", name) for name in main.commands["jobs"].commands)]  # type: ignore[attr-defined]
ZOO = [("zoo",), *(("zoo", name) for name in main.commands["zoo"].commands)]  # type: ignore[attr-defined]
CODES = {"jobs": JOBS_CODES, "zoo": ZOO_CODES}


def section(heading: str) -> str:
    return PAGE.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("path", [*RUNS, *JOBS, *ZOO], ids=" ".join)
def test_every_help_has_examples_of_that_command_and_the_exit_codes(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, [*path, "--help"])
    assert done.exit_code == 0
    shown, _, codes = done.output.partition("Examples:")[2].partition("Exit codes:")
    assert " ".join(("backstay", *path)) in re.sub(r" --endpoint \S+", "", shown)
    for code in CODES.get(path[0], JOB_CODES):
        assert re.search(rf"{code} +{re.escape(code.meaning)}", codes)


@pytest.mark.parametrize("path", [*RUNS, *JOBS, *ZOO], ids=" ".join)
def test_every_command_is_on_the_page_and_every_option_explains_itself(
    path: tuple[str, ...],
) -> None:
    if len(path) == 2:
        rows = section(f"## backstay {path[0]}")
        assert re.search(rf"^\| `{path[1]}[ `]", rows, re.MULTILINE)
    for option in command_at(*path).params:
        if isinstance(option, click.Option):
            assert option.help, f"{' '.join(path)} {option.opts[0]} has no help"


def test_what_is_no_job_is_told_where_it_belongs(job: Path) -> None:
    for arguments, message in [
        ([], "no job is given: name a job file, such as job.yaml, or give at least"),
        (["model.py"], "the model file is given by `model:` in it, or by --model model.py"),
        ([str(job), "--servers", "ps-0:7000"], "are named by --endpoint ps-0:7000"),
        ([str(job), "--servers", "some"], "are named by --endpoint HOST:PORT"),
    ]:
        done = CliRunner().invoke(main, ["train", *arguments])
        assert done.exit_code == 2
        assert message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "epochs: 0 is out of range"),
        (["--set", "workers.maxx=1"], "workers.maxx: no such field; did you mean 'max'?"),
        (["--set", "epochs"], "--set: 'epochs' is not NAME=VALUE"),
        (["--param", "width=[1"], "'[1' is not a YAML value"),
        (["--servers", "1", "--endpoint", "a:1"], "--servers and --endpoint: give one of them"),
    ],
)
def test_a_wrong_argument_is_a_sentence_and_code_2(
    job: Path, arguments: list[str], message: str
) -> None:
    done = CliRunner().invoke(main, ["train", str(job), "--dry-run", "--json", *arguments])
    assert done.exit_code == 2
    assert message in json.loads(done.stdout)["error"]
    assert done.stderr.startswith("Error: ")


@pytest.mark.parametrize("words", ["list", "show a", "scale a 2", "stop a", "retry a", "audit a"])
def test_jobs_without_an_endpoint_or_an_answer_say_so(words: str) -> None:
    done = CliRunner().invoke(main, ["jobs", *words.split()])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: endpoint: give --endpoint HOST:PORT or set BACKSTAY_")


def spec_with(servers: ServersSpec) -> JobSpec:
    return JobSpec(name="a", model="m.py", training=DataSpec(paths=("x.csv",)), servers=servers)


def test_which_servers_a_job_gets() -> None:
    other = {"BACKSTAY_ENDPOINT": "a:1,b:2"}
    plain = spec_with(ServersSpec())
    assert chosen_servers(plain, {})[:2] == (3, ())
    assert chosen_servers(plain, other) == (0, ("a:1", "b:2"), "BACKSTAY_ENDPOINT")
    assert chosen_servers(spec_with(ServersSpec(local=1)), other)[:2] == (1, ())
    named = spec_with(ServersSpec(endpoints=("c:3",)))
    assert chosen_servers(named, other)[:2] == (0, ("c:3",))


def status_of(**fields: Any) -> job_pb2.JobStatus:
    status = job_pb2.JobStatus(job="tiny", state="running", passes=2, now_ms=5000, **fields)
    status.tasks.total = 10
    return status


def test_what_a_status_says_in_words() -> None:
    status = status_of(kind=job_pb2.TASK_KIND_TRAINING, round=2)
    assert round_text(status) == "pass 2 of 2"
    assert metrics_text(status) == ""
    status.evaluations.add(round=1, steps=5, metrics={"logloss": 0.5, "auc": 0.81234})
    assert metrics_text(status) == "auc 0.8123  logloss 0.5000"
    status.state, status.dead_letters, status.loss = "done", 2, 0.25
    assert summary_lines(status) == [
        "tiny: done",
        "0 examples in 0 steps, loss 0.2500",
        "auc 0.8123  logloss 0.5000",
        "2 tasks failed too often; see `backstay jobs show tiny`",
    ]
    assert round_text(status_of(kind=job_pb2.TASK_KIND_TRAIN_END)) == "end of training"


def test_exit_codes_of_outcomes() -> None:
    failed = status_of(dead_letters=1)
    for state, status, is_finished, code in [
        ("done", status_of(), True, 0),
        ("failed", failed, True, 6),
        ("failed", failed, False, 1),
        ("stopped", failed, False, 130),
        ("failed", None, False, 1),
    ]:
        outcome = Outcome(status, state, "", 1.0, None, is_finished)
        assert outcome.exit_code == code
        document = outcome.to_mapping(spec_with(ServersSpec()))
        assert (document["state"], document["exit_code"]) == (state, code)
        json.dumps(document)


def test_an_audit_that_finds_something_is_a_failure() -> None:
    failed = status_of(dead_letters=1)
    wrong = RecordsAudit(1, 10, 9, 1, 0, 0, 0, (("a.csv", 3, 0),))
    right = RecordsAudit(1, 10, 10, 0, 0, 0, 0, ())
    assert Outcome(status_of(), "done", "", 1.0, right, True).exit_code == 0
    assert Outcome(status_of(), "done", "", 1.0, wrong, True).exit_code == 1
    # The records of a dead-lettered task are missing, and the command says so by its own code.
    assert Outcome(failed, "failed", "", 1.0, wrong, True).exit_code == 6


def test_the_metrics_log_has_each_change_and_each_evaluation_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, tensorboard=False) as log:
        status = status_of(steps=5)
        log.write(status)
        log.write(status)
        status.steps = 9
        status.evaluations.add(round=1, steps=9, records=10, metrics={"auc": 0.5})
        log.write(status)
        log.write(status)
    # A job that goes on: its old evaluations are in the file already.
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.seen(status)
        log.write(status)
    lines = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert [(line["step"], line.get("metrics")) for line in lines] == [
        (5, None), (9, None), (9, {"auc": 0.5}), (9, None),
    ]  # fmt: skip
    assert lines[0]["loss"] is None
    assert lines[0]["time_s"] == 5.0


def test_event_files_can_be_read_by_their_format(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    with MetricsLog(tmp_path, tensorboard=True) as log:
        status = status_of(steps=7, loss=0.5, examples_per_s=100.0)
        status.evaluations.add(round=1, steps=7, metrics={"auc": 0.75})
        log.write(status)
    (path,) = (tmp_path / "tensorboard").iterdir()
    found: dict[str, tuple[int, float]] = {}
    rest = path.read_bytes()
    while rest:
        size = int.from_bytes(rest[:8], "little")
        body = rest[12 : 12 + size]
        assert int.from_bytes(rest[12 + size : 16 + size], "little") == masked_crc32c(body)
        event, rest = Event.FromString(body), rest[16 + size :]
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
    assert found == {
        "loss": (7, 0.5),
        "examples_per_s": (7, 100.0),
        "workers_alive": (7, 0.0),
        "evaluation/auc": (7, 0.75),
    }
