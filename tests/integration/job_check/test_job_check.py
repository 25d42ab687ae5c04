"""What commands find out before they start anything: model files are loaded in another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backstay.checkpoint.storage import CheckpointStorage
from backstay.errors import ConfigError, JobError, NonFiniteLoss
from backstay.exit_codes import ExitCode
from backstay.job_check import process as check_process
from backstay.job_check.process import check_job_apart, dry_run_apart
from backstay.job_spec import JobSpec
from tests.waiting import wait_until

pytest.importorskip("torch")

LIMIT_S = 120.0
MODEL = """\
import torch

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.top = torch.nn.Linear(1, width)

    def forward(self, x):
        return self.top(x)[:, 0]

def custom_model(width=1):
    return Net(width)

def loss(labels, predictions):
    return ((labels - predictions) ** 2).mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def feed(records, mode, metadata):
    x = torch.tensor([float(value) for value in records.column("x")])
    return x[:, None] if mode == "prediction" else (x[:, None], x)

def eval_metrics():
    return {"mse": "mse"}
"""
JOB = """\
name: tiny
model: model.py
training: train.csv
validation: train.csv
prediction: train.csv
output: out
records_per_task: 4
epochs: 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.csv").write_text("x,y\n" + "1,0\n" * 10)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def spec_in(folder: Path, model: str = MODEL, **fields: Any) -> JobSpec:
    (folder / "model.py").write_text(model)
    train = str(folder / "train.csv")
    document = {"name": "tiny", "model": str(folder / "model.py"), "training": train, **fields}
    return JobSpec.from_mapping(document)


def backstay(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "backstay.cli", *words],
        cwd=folder, capture_output=True, text=True, timeout=LIMIT_S,
        env={name: value for name, value in os.environ.items() if not name.startswith("BACKSTAY_")},
    )  # fmt: skip


def test_a_dry_run_shows_the_whole_job_and_starts_nothing(folder: Path) -> None:
    done = backstay(folder, "train", "job.yaml", "--dry-run", "--json", "--workers", "3")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["spec"]["workers"]["initial"] == 3
    data = shown["data"]
    assert [(plan["use"], plan["records"], plan["tasks"]) for plan in data] == [
        ("training", 10, 3),
        ("validation", 10, 3),
    ]
    assert data[0]["columns"] == ["x", "y"]
    assert data[0]["tried"].startswith("feed, model, loss and optimizer, on the first 8 records of")
    assert data[1]["tried"].startswith("feed and model, on the first 8 records of")
    assert (shown["framework"], shown["metrics"]) == ("torch", ["mse"])
    assert shown["rounds"] == {"training": 2, "evaluation": 2}
    assert shown["servers"] == {"local": 3, "endpoints": []}
    assert not (folder / "backstay-jobs").exists()
    assert not (folder / "out").exists()


def test_a_job_of_one_process_keeps_its_model(folder: Path) -> None:
    job = (folder / "job.yaml").read_text().replace("output: out\n", "")
    (folder / "job.yaml").write_text(job)
    done = backstay(folder, "train", "job.yaml", "--local", "--json")
    assert done.returncode == 0, done.stderr
    kept = folder / "backstay-jobs" / "tiny" / "model"
    assert json.loads(done.stdout)["output"] == str(kept)
    assert f"the model will be in {kept}" in done.stderr.replace("\n", "")
    assert [each.name for each in kept.iterdir()] == ["model.pt"]


def test_a_job_of_one_process_keeps_the_rows_of_its_own_server(folder: Path) -> None:
    model = MODEL.replace("torch.nn.Linear(1, width)", "Embedding(9, 1)").replace(
        "self.top(x)[:, 0]", "self.top(x[:, 0].long())[:, 0]"
    )
    (folder / "model.py").write_text("from backstay.trainer.torch import Embedding\n" + model)
    done = backstay(folder, "train", "job.yaml", "--local", "--json")
    assert done.returncode == 0, done.stderr
    rows = CheckpointStorage(folder / "out" / "rows")
    manifest = rows.read_manifest(rows.ids()[-1])
    # One embedding, and the audit of nothing: the model has no dense parameters.
    assert int(manifest.slots.rows.sum()) == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("train", "--param", "height=1"), 2, "cannot be called as custom_model(height=...)"),
        (("train", "--model", "none.py"), 2, "there is no file"),
        (("train", "--model", "broken.py"), 2, 'broken.py", line 1'),
        (("train", "--training", "/no/such/*.csv"), 1, "/no/such/*.csv: there is no such file"),
        (("train", "--training", "head.csv"), 2, "training: there are no records in"),
        (("train", "--training", "head.csv", "--local"), 2, "training: there are no records in"),
        (("train", "--training", "head.csv", "--dry-run"), 2, "training: there are no records in"),
        (("train", "--training", "none.csv", "--local"), 1, "none.csv: there is no such file"),
        (("train", "--training", "data.bin"), 2, "training.kind: "),
        (("train", "--log-dir", "/proc/x"), 2, "log_dir: cannot write to /proc/x: No such file"),
        (("train", "--log-dir", "/proc/x", "--dry-run"), 2, "log_dir: cannot write to /proc/x: "),
        (("train", "--output", "/proc/x"), 2, "output: cannot write to /proc/x: No such file"),
        (("train", "--output", "/proc/x", "--dry-run"), 2, "output: cannot write to /proc/x: "),
        (("train", "--output", "/proc/x", "--local"), 2, "output: cannot write to /proc/x: "),
        (("train", "--output", "nowhere://x"), 2, "output: cannot write to nowhere://x: Protocol"),
        (("predict", "--output", "/proc/x"), 2, "output: cannot write to /proc/x: No such file"),
        (("evaluate", "--validation", "empty"), 1, "empty: the folder is empty, or has only"),
        (("predict", "--prediction", "head.csv"), 2, "prediction: there are no records in"),
    ],
)
def test_a_job_that_cannot_be_right_is_refused_before_servers_start(
    folder: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    (folder / "broken.py").write_text("def custom_model(:\n")
    (folder / "head.csv").write_text("x,y\n")
    (folder / "data.bin").write_text("1\n")
    (folder / "empty").mkdir()
    # For evaluate and predict there would be a model.
    (folder / "backstay-jobs" / "tiny" / "checkpoints").mkdir(parents=True)
    done = backstay(folder, words[0], "job.yaml", "--servers", "1", "--json", *words[1:])
    assert done.returncode == code, done.stderr
    assert message in json.loads(done.stdout)["error"]
    assert f"Error: {json.loads(done.stdout)['error']}" in done.stderr
    assert not list(folder.rglob("servers"))


def test_files_without_records_are_named_and_the_others_trained_on(folder: Path) -> None:
    (folder / "head.csv").write_text("x,y\n")
    (folder / "both.yaml").write_text(JOB.replace("train.csv", "[train.csv, head.csv]", 1))
    done = backstay(folder, "train", "both.yaml", "--local", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["examples"] == 20
    assert "head.csv; the job goes on without" in done.stderr.replace("\n", "")
    shown = backstay(folder, "jobs", "show", "tiny").stdout
    assert shown.startswith("tiny: done\n20 examples in ")
    # A run that fails says so there, too, whatever the one before it left.
    (folder / "model.py").write_text(MODEL.replace("self.top(x)[", "self.top(x, x)["))
    assert backstay(folder, "train", "both.yaml", "--local", "--json").returncode == 2
    shown = backstay(folder, "jobs", "show", "tiny").stdout
    assert shown.startswith("tiny: failed (the model failed on ")


@pytest.mark.parametrize(
    ("old", "new", "kind", "said"),
    [
        ('column("x")', 'column("z")', ConfigError, "feed failed on the first 8 records of"),
        ("else (x[:, None], x)", "else x", ConfigError, "it must return a pair"),
        ("self.top(x)[", "self.top(x, x)[", ConfigError, "the model failed on the first 8"),
        ("** 2).mean()", "** 2)", ConfigError, "it must return a tensor of one number"),
        (").mean()", ").mean() / 0", NonFiniteLoss, "the loss is inf"),
        ("lr=0.1", "lr='fast'", ConfigError, "the model cannot be made"),
        ("return Net(width)", "return width", ConfigError, "it must return a torch.nn.Module"),
    ],
)
def test_a_dry_run_finds_what_fails_with_the_first_records(
    folder: Path, old: str, new: str, kind: type[Exception], said: str
) -> None:
    assert old in MODEL
    with pytest.raises(kind) as caught:
        dry_run_apart(spec_in(folder, MODEL.replace(old, new)))
    assert said in str(caught.value)
    if kind is ConfigError and "return" not in said:
        # The user's own line.
        assert 'model.py", line ' in str(caught.value)


def test_a_model_file_that_ends_its_process_is_an_error(folder: Path) -> None:
    for ending, how in [
        ("import sys; print('last words'); sys.exit(3)", "exit code 3.*it wrote:\nlast words"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
    ]:
        with pytest.raises(JobError, match=f"(?s)ended by {how}"):
            check_job_apart(spec_in(folder, ending), lambda: False)


def test_a_model_file_that_never_ends_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_process, "LIMIT_S", 0.2)
    with pytest.raises(JobError, match=r"took longer than 0\.2 s"):
        check_job_apart(spec_in(folder, "import time\ntime.sleep(3600)\n"), lambda: False)


def test_the_model_file_sees_what_its_workers_will(folder: Path) -> None:
    model = "import os\nassert os.environ['FLAVOUR'] == 'sweet'\n" + MODEL
    workers = {"initial": 1, "env": {"FLAVOUR": "sweet"}}
    assert check_job_apart(spec_in(folder, model, workers=workers), lambda: False).warnings == ()


def test_data_that_a_hook_makes_is_looked_at_after_it(folder: Path) -> None:
    hooks = 'hooks:\n  before: ["echo x > made.csv"]\n'
    text = JOB.replace("training: train.csv", "training: made.csv") + hooks
    (folder / "hooked.yaml").write_text(text)
    done = backstay(folder, "train", "hooked.yaml", "--servers", "1", "--json")
    assert (folder / "made.csv").exists()
    assert "training: there are no records in" in json.loads(done.stdout)["error"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_check_ends_with_its_command(folder: Path, number: signal.Signals) -> None:
    where = "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\n"
    (folder / "model.py").write_text(f"{where}time.sleep(3600)\n")
    with subprocess.Popen(
        [sys.executable, "-m", "backstay.cli", "train", "job.yaml", "--servers", "1"], cwd=folder
    ) as process:
        try:
            pid_file = folder / "pid"
            pid = int(wait_until(lambda: pid_file.read_text() if pid_file.exists() else ""))
            process.send_signal(number)
            wanted = ExitCode.STOPPED if number == signal.SIGTERM else -signal.SIGKILL
            assert process.wait(LIMIT_S) == wanted
        finally:
            process.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
