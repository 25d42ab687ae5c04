"""``backstay train`` and ``jobs`` as users run them, while parts of it, or all of it, are killed.

The model file waits at gates (files that the test makes), so that a fault comes at a known place.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from backstay.pserver.ctl.cli import main as pserverctl
from backstay.pserver.local_cluster import LocalCluster
from tests.integration.checkpoint.test_checkpoint_disks import namespace, why_no_mounts
from tests.processes import is_gone
from tests.waiting import wait_until

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WAIT_S = 90.0
RECORDS = 400
BACKSTAY = [sys.executable, "-m", "backstay.cli"]

MODEL = '''
import os
import time
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(50, 4, sparse=True)
        self.top = torch.nn.Linear(5, 1)

    def forward(self, ids, x):
        return self.top(torch.cat([self.rows(ids), x], dim=1))[:, 0]


def custom_model():
    torch.manual_seed(1)
    return Net()


def loss(labels, predictions):
    return torch.nn.functional.binary_cross_entropy_with_logits(predictions, labels)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def wait_for(gate):
    """Stand still at a closed gate until the test opens it."""
    while (HERE / f"{gate}.closed").exists():
        time.sleep(0.01)


def feed(records, mode, metadata):
    numbers = records.column("n").astype(np.int64)
    if mode == "training" and numbers.max() >= 200:
        wait_for("training")
    if mode == "evaluation":
        wait_for("evaluation")
    if mode == "training" and (HERE / "broken").exists() and 7 in numbers:
        raise ValueError("record 7 is not to my taste")
    x = (numbers % 2).astype(np.float32)
    features = torch.from_numpy(numbers % 50), torch.from_numpy(x[:, None])
    return features if mode == "prediction" else (features, torch.from_numpy(x))


def eval_metrics():
    return {"auc": "auc"}
'''

JOB = """\
name: tiny
model: model.py
training: train.csv
validation: train.csv
prediction: train.csv
batch_size: 20
records_per_task: 40
shuffle: none
epochs: 2
audit: true
task_lease_ttl_ms: 1000
max_task_retries: 1
workers: 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    rows = "".join(f"{number}\n" for number in range(RECORDS))
    (tmp_path / "train.csv").write_text("n\n" + rows)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def close(folder: Path, gate: str) -> None:
    (folder / f"{gate}.closed").touch()


def open_gate(folder: Path, gate: str) -> None:
    (folder / f"{gate}.closed").unlink()


@contextmanager
def started(
    folder: Path, *words: str, program: Sequence[str] = BACKSTAY
) -> Iterator[subprocess.Popen[str]]:
    with (folder / "stderr").open("a") as log:
        process = subprocess.Popen(
            [*program, *words], cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True
        )
        with process:
            try:
                yield process
            finally:
                process.kill()


def result_of(folder: Path, process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=WAIT_S)
    assert output, (folder / "stderr").read_text()
    document: dict[str, Any] = json.loads(output)
    assert document.get("exit_code") == process.returncode, document
    return document


def run(folder: Path, *words: str) -> dict[str, Any]:
    with started(folder, *words) as process:
        return result_of(folder, process)


def jobs(
    folder: Path, *words: str, endpoint: str | None = None
) -> subprocess.CompletedProcess[str]:
    endpoint = endpoint or endpoint_of(folder)
    return subprocess.run(
        [*BACKSTAY, "jobs", "--endpoint", endpoint, *words],
        capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip


def endpoint_of(folder: Path) -> str:
    """What the newest run said about its servers."""
    said = [
        line for line in (folder / "stderr").read_text().splitlines() if "export BACKSTAY" in line
    ]
    return said[-1].rpartition("=")[2] if said else ""


def shown(folder: Path, endpoint: str | None = None) -> dict[str, Any]:
    """What ``jobs show`` says now; empty while no process answers."""
    endpoint = endpoint or endpoint_of(folder)
    if not endpoint:
        return {}
    done = jobs(folder, "show", "tiny", "--json", endpoint=endpoint)
    document: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return document.get("status") or {}


def children(pid: int) -> dict[int, str]:
    """The command lines of the processes below one."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            line = (path.parent / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found[int(path.parent.name)] = line
    return found


def wait_for_child(pid: int, words: str) -> int:
    """Wait for a process below one, and return its id."""
    found: int = wait_until(
        lambda: next((one for one, line in children(pid).items() if words in line), None)
    )
    return found


def test_each_record_counts_once_when_a_worker_and_the_master_are_killed(folder: Path) -> None:
    progressive = "progressive: {window_examples: 100, predictions: logits}\n"
    (folder / "job.yaml").write_text(JOB + progressive)
    close(folder, "training")
    with started(folder, "train", "job.yaml", "--servers", "1", "--json") as process:
        # Both workers stand at the gate, each in the middle of its work.
        wait_until(lambda: shown(folder).get("tasks", {}).get("doing") == "2")
        os.kill(wait_for_child(process.pid, "--worker-id w-0"), signal.SIGKILL)
        os.kill(wait_for_child(process.pid, "master.serve_cli"), signal.SIGKILL)
        wait_for_child(process.pid, "--worker-id w-2")
        done = jobs(folder, "scale", "tiny", "3")
        assert done.stdout == "tiny: 3 workers wanted, 2 before\n", done.stderr
        wait_for_child(process.pid, "--worker-id w-3")
        open_gate(folder, "training")
        result = result_of(folder, process)
    assert (result["state"], result["exit_code"]) == ("done", 0)
    assert result["records_counted_once"]
    assert result["audit"]["records"] == RECORDS
    assert result["audit"]["passes"] == 2
    assert result["master_starts"] == 2
    assert [one["round"] for one in result["evaluations"]] == [1, 2]
    assert result["evaluations"][-1]["metrics"]["auc"] > 0.9
    log_dir = folder / "backstay-jobs" / "tiny"
    lines = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum("metrics" in line for line in lines) == 2
    # So do the predictions before training.
    assert result["progressive"]["examples"] == 2 * RECORDS
    windows = {line["window"]: line["examples"] for line in lines if "window" in line}
    assert list(windows) == list(range(1, len(windows) + 1))
    left = 2 * RECORDS - sum(windows.values())
    assert 0 <= left < 100
    assert {path.name for path in (log_dir / "workers").iterdir()} >= {"w-0.log", "w-1.log"}


def test_ctrl_c_and_the_same_command_goes_on_from_the_checkpoint(folder: Path) -> None:
    close(folder, "evaluation")
    command = ("train", "job.yaml", "--servers", "1", "--json")
    with started(folder, *command) as process:
        wait_until(lambda: shown(folder).get("checkpoint"))
        below = children(process.pid)
        process.send_signal(signal.SIGINT)
        result = result_of(folder, process)
    assert (result["state"], result["reason"], process.returncode) == ("stopped", "Ctrl-C", 130)
    assert all(is_gone(pid) for pid in below)
    # No process is left to ask; its folder tells.
    left = [*BACKSTAY, "jobs", "show", "tiny", "--json"]
    last = json.loads(subprocess.run(left, cwd=folder, capture_output=True, timeout=WAIT_S).stdout)
    assert (last["state"], last["status"]["checkpoint"]) == ("stopped", result["checkpoint"])
    open_gate(folder, "evaluation")
    result = run(folder, *command)
    assert (result["state"], result["records_counted_once"]) == ("done", True)
    assert result["audit"]["passes"] == 2
    # The second run trained the second pass only.
    lines = (folder / "backstay-jobs/tiny/metrics.jsonl").read_text().splitlines()
    assert "stopped" in {json.loads(line).get("state") for line in lines}
    # All is done: the same command again has nothing to do, and says the same.
    again = run(folder, *command)
    kept = ("state", "steps", "examples", "loss", "evaluations")
    assert {name: again[name] for name in kept} == {name: result[name] for name in kept}
    told = run_to_its_end(folder, *(word for word in command if word != "--json")).stdout
    assert "nothing was left to train: --epochs adds passes" in told
    # The model is judged and used by jobs of their own.
    judged = run(folder, "evaluate", "job.yaml", "--servers", "1", "--json")
    assert judged["evaluations"][0]["metrics"] == result["evaluations"][-1]["metrics"]
    predicted = run(folder, "predict", "job.yaml", "--servers", "1", "--output", "out", "--json")
    assert predicted["state"] == "done"
    assert any((folder / "out").iterdir())


def test_nothing_outlives_a_command_that_is_killed(folder: Path) -> None:
    close(folder, "training")
    with started(folder, "train", "job.yaml", "--servers", "1") as process:
        wait_until(lambda: shown(folder).get("tasks", {}).get("doing") == "2")
        below = children(process.pid)
        assert len(below) == 4, below
        process.kill()
    wait_until(lambda: all(is_gone(pid) for pid in below))


def test_tasks_that_fail_are_dead_lettered_named_and_tried_again_by_the_same_command(
    folder: Path,
) -> None:
    (folder / "broken").touch()
    with LocalCluster(1) as cluster:
        endpoint = cluster.endpoints[0]
        command = ("train", "job.yaml", "--endpoint", endpoint, "--epochs", "1", "--json")
        # Another job on the same cluster does not mind.
        (folder / "other.yaml").write_text(JOB.replace("name: tiny", "name: other"))
        other = ("train", "other.yaml", "--endpoint", endpoint, "--set", "training=part.csv")
        (folder / "part.csv").write_text("n\n" + "".join(f"{number}\n" for number in range(50, 90)))
        with started(folder, *other, "--epochs", "1", "--json") as process:
            result = run(folder, *command)
            beside = result_of(folder, process)
        assert (result["state"], result["exit_code"], result["dead_letters"]) == ("failed", 6, 1)
        assert (beside["exit_code"], beside["records_counted_once"]) == (0, True)
        text = jobs(folder, "show", "tiny", endpoint=endpoint).stdout
        assert "dead letter: training 1, task 0: records 0 to 39" in text
        assert "ValueError: record 7 is not to my taste" in text
        listed = json.loads(jobs(folder, "list", "--json", endpoint=endpoint).stdout)["jobs"]
        assert [(one["job"], one["state"]) for one in listed] == [
            ("other", "done"), ("tiny", "failed"),
        ]  # fmt: skip
        scaled = jobs(folder, "scale", "tiny", "3", endpoint=endpoint)
        assert scaled.returncode == 1
        assert "it has no job master any more" in scaled.stderr
        logs = jobs(folder, "logs", "tiny", endpoint=endpoint)
        assert "w-0 " in logs.stdout, logs.stderr
        # The dead-lettered task has counted nothing, as the job says; all others once.
        told = json.loads(jobs(folder, "audit", "tiny", "--json", endpoint=endpoint).stdout)
        assert (told["records_counted_once"], told["unfinished"]) == (True, 40)
        (folder / "broken").unlink()
        result = run(folder, *command)
        assert (result["exit_code"], result["records_counted_once"]) == (0, True)
        assert jobs(folder, "audit", "tiny", endpoint=endpoint).returncode == 0
        # Another job under the same name is refused, with what differs.
        (folder / "job.yaml").write_text(JOB.replace("batch_size: 20", "batch_size: 10"))
        refused = run_to_its_end(folder, *command)
        assert refused.returncode == 2
        assert "batch_size is 10, was 20" in refused.stderr
        # Begun anew, its counters begin anew, too.
        anew = run(folder, *command, "--fresh")
        assert (anew["state"], anew["steps"], anew["records_counted_once"]) == ("done", 40, True)


def test_a_job_does_not_go_on_with_other_data(folder: Path) -> None:
    with LocalCluster(1) as cluster:
        command = ("train", "job.yaml", "--endpoint", cluster.endpoints[0], "--json")
        assert run(folder, *command, "--epochs", "1")["state"] == "done"
        data = folder / "train.csv"
        data.write_text(data.read_text().replace("\n399\n", "\n398\n"))
        refused = run_to_its_end(folder, *command)
        assert refused.returncode == 1
        assert f"{data} has other content" in refused.stderr
        assert "--fresh" in refused.stderr
        # Put back, it goes on.
        data.write_text(data.read_text().replace("\n398\n398\n", "\n398\n399\n"))
        assert run(folder, *command)["audit"]["passes"] == 2
        data.write_text("n\n" + "".join(f"{number}\n" for number in range(80)))
        anew = run(folder, *command, "--fresh")
        assert (anew["state"], anew["examples"]) == ("done", 160)


def test_a_job_that_runs_is_not_run_twice(folder: Path) -> None:
    close(folder, "training")
    with LocalCluster(1) as cluster:
        command = ("train", "job.yaml", "--endpoint", cluster.endpoints[0], "--json")
        with started(folder, *command) as process:
            wait_until(lambda: shown(folder).get("tasks", {}).get("doing") == "2")
            again = run_to_its_end(folder, *command)
            assert again.returncode == 1
            assert f"is already run by process {process.pid} on " in again.stderr
            # Elsewhere, with logs of its own.
            again = run_to_its_end(folder, *command, "--log-dir", "other")
            assert again.returncode == 1
            assert "is running already: its job master is at 127.0.0.1:" in again.stderr
            assert not (folder / "other" / "workers").exists()
            # The first one has not noticed, and may be killed: the same command goes on.
            assert process.poll() is None
            process.kill()
        open_gate(folder, "training")
        result = run(folder, *command)
    assert (result["state"], result["records_counted_once"]) == ("done", True)


def run_to_its_end(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BACKSTAY, *words], cwd=folder, capture_output=True, text=True, timeout=WAIT_S
    )


STOPS = [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]


@pytest.mark.parametrize(("number", "reason"), STOPS, ids=["ctrl-c", "sigterm"])
def test_a_job_that_is_stopped_in_a_pass_is_saved_first(
    folder: Path, number: signal.Signals, reason: str
) -> None:
    close(folder, "training")
    command = ("train", "job.yaml", "--servers", "1", "--json")
    with started(folder, *command) as process:
        wait_until(lambda: shown(folder).get("tasks", {}).get("done") == "5")
        process.send_signal(number)
        stopped = result_of(folder, process)
    assert (stopped["state"], stopped["reason"], process.returncode) == ("stopped", reason, 130)
    assert stopped["checkpoint"]
    assert stopped["examples"] == 200
    open_gate(folder, "training")
    result = run(folder, *command)
    assert (result["state"], result["records_counted_once"]) == ("done", True)
    # What was done before is not done again.
    assert result["examples"] == 2 * RECORDS
    assert f"goes on from checkpoint {stopped['checkpoint']}" in (folder / "stderr").read_text()


def test_a_second_ctrl_c_does_not_wait_for_the_checkpoint(folder: Path) -> None:
    close(folder, "training")
    with started(folder, "train", "job.yaml", "--servers", "1") as process:
        wait_until(lambda: shown(folder).get("tasks", {}).get("done") == "5")
        configure(folder, "checkpoint_bytes_per_s=100")
        below = children(process.pid)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: shown(folder).get("saving"))
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    said = (folder / "stderr").read_text()
    assert "ended at once; the servers end with this command, and no checkpoint was written" in said
    wait_until(lambda: all(is_gone(pid) for pid in below))


def configure(folder: Path, change: str) -> None:
    """Change a setting of the job's own servers."""
    words = ["--endpoint", endpoint_of(folder), "config", "set", change]
    done = CliRunner().invoke(pserverctl, words)
    assert done.exit_code == 0, done.output


def fill_up(disk: Path) -> None:
    """Let no process write to a folder any more."""
    shutil.rmtree(disk)
    disk.touch()


def try_again(folder: Path) -> None:
    """Have the last checkpoint tried at once, unless it was just tried anyway."""
    done = jobs(folder, "retry", "tiny")
    said = "the last checkpoint is tried again" in done.stdout
    assert said or "job 'tiny' is done" in done.stderr, done


def test_a_job_whose_last_checkpoint_cannot_be_written_waits_for_it(folder: Path) -> None:
    close(folder, "training")
    disk = folder / "disk"
    command = ("train", "job.yaml", "--servers", "1", "--json", "--epochs", "1")
    with started(folder, *command, "--set", f"checkpoint.url={disk}") as process:
        wait_until(lambda: shown(folder).get("tasks", {}).get("done") == "5")
        fill_up(disk)
        open_gate(folder, "training")
        wait_until(lambda: shown(folder).get("state") == "unsaved")
        told = jobs(folder, "show", "tiny").stdout
        assert "tiny: unsaved (the last checkpoint is not written yet: " in told
        said = (folder / "stderr").read_text()
        assert "warning: no checkpoint was written: " in said
        assert "The servers are kept" in said
        disk.unlink()
        disk.mkdir()
        try_again(folder)
        result = result_of(folder, process)
    assert (result["state"], result["exit_code"]) == ("done", 0)
    assert result["checkpoint"] in {path.name for path in disk.iterdir()}
    assert result["checkpoints_failed"] >= 1
    assert result["records_counted_once"]


def test_a_job_that_is_given_up_without_its_last_checkpoint_is_not_done(folder: Path) -> None:
    close(folder, "training")
    disk = folder / "disk"
    command = ("train", "job.yaml", "--servers", "1", "--json", "--epochs", "1")
    with started(folder, *command, "--set", f"checkpoint.url={disk}") as process:
        wait_until(lambda: shown(folder).get("tasks", {}).get("done") == "5")
        fill_up(disk)
        open_gate(folder, "training")
        wait_until(lambda: shown(folder).get("state") == "unsaved")
        assert jobs(folder, "stop", "tiny").returncode == 0
        result = result_of(folder, process)
    assert (result["state"], result["exit_code"], result["checkpoint"]) == ("unsaved", 5, None)
    assert "the last checkpoint was not written" in result["reason"]
    left = [*BACKSTAY, "jobs", "show", "tiny", "--json"]
    last = json.loads(subprocess.run(left, cwd=folder, capture_output=True, timeout=WAIT_S).stdout)
    assert last["state"] == "unsaved"


def test_a_disk_that_is_full_at_the_end_loses_no_model(folder: Path) -> None:
    disk, other = folder / "disk", folder / "other"
    disk.mkdir()
    if reason := why_no_mounts(disk):
        pytest.skip(reason)
    mount = f"mount -t tmpfs -o size=8k backstay-test {disk}"
    train = f"{' '.join(BACKSTAY)} train job.yaml --servers 1 --json --set checkpoint.url={disk}"
    program = [*namespace(), "sh", "-c", f"{mount} && exec {train}"]
    with started(folder, program=program) as process:
        wait_until(lambda: shown(folder).get("state") == "unsaved")
        assert "No space left on device" in shown(folder)["reason"]
        other.mkdir()
        configure(folder, f"checkpoint_url={other}")
        try_again(folder)
        result = result_of(folder, process)
    assert (result["state"], result["exit_code"]) == ("done", 0)
    assert result["checkpoint"] in {path.name for path in other.iterdir()}


def test_a_checkpoint_in_another_folder_is_exported_and_gone_on_from(folder: Path) -> None:
    close(folder, "training")
    disk, other = folder / "disk", folder / "other"
    command = ("train", "job.yaml", "--servers", "1", "--json", "--set", f"checkpoint.url={disk}")
    with started(folder, *command, "--epochs", "1") as process:
        wait_until(lambda: shown(folder).get("tasks", {}).get("done") == "5")
        fill_up(disk)
        open_gate(folder, "training")
        wait_until(lambda: shown(folder).get("state") == "unsaved")
        other.mkdir()
        configure(folder, f"checkpoint_url={other}")
        try_again(folder)
        first = result_of(folder, process)
    assert (first["state"], first["checkpoint_url"]) == ("done", str(other))
    left = [*BACKSTAY, "jobs", "show", "tiny"]
    shown_last = subprocess.run(left, cwd=folder, capture_output=True, text=True, timeout=WAIT_S)
    assert f"checkpoint {first['checkpoint']} in {other}" in shown_last.stdout
    export = [*BACKSTAY, "export", "tiny", "served", "--json"]
    made = subprocess.run(export, cwd=folder, capture_output=True, text=True, timeout=WAIT_S)
    assert json.loads(made.stdout)["checkpoint"] == first["checkpoint"], made.stderr
    disk.unlink()
    disk.mkdir()
    # Nothing is left to do, and the checkpoint is remembered all the same.
    again = run(folder, *command, "--epochs", "1")
    assert (again["examples"], again["checkpoint_url"]) == (RECORDS, str(other))
    more = run(folder, *command, "--epochs", "2")
    assert (more["state"], more["examples"]) == ("done", 2 * RECORDS)
    assert more["records_counted_once"]
    other.rename(folder / "elsewhere")
    lost = subprocess.run([*BACKSTAY, *command], cwd=folder, capture_output=True, timeout=WAIT_S)
    assert lost.returncode == 1
    assert f"{more['checkpoint']}, was written to {other}" in json.loads(lost.stdout)["error"]


def rate_of_rows(endpoint: str) -> tuple[float, int]:
    """The learning rate that the servers have for the model's rows, and of which revision."""
    command = [sys.executable, "-m", "backstay.pserver.ctl.cli", "--endpoint", endpoint]
    done = subprocess.run([*command, "tables", "--json"], capture_output=True, timeout=WAIT_S)
    (rows,) = (
        one for one in json.loads(done.stdout)["tables"] if one["name"].startswith("tiny/rows")
    )
    return rows["spec"]["optimizer"]["sgd"]["learning_rate"], rows["revision"]


def test_a_job_goes_on_with_another_learning_rate_and_says_so(folder: Path) -> None:
    model = folder / "model.py"
    with LocalCluster(1) as cluster:
        endpoint = cluster.endpoints[0]
        command = ("train", "job.yaml", "--endpoint", endpoint, "--json")
        assert run(folder, *command, "--epochs", "1")["state"] == "done"
        assert rate_of_rows(endpoint) == (0.1, 1)
        model.write_text(MODEL.replace("lr=0.1", "lr=0.05"))
        result = run(folder, *command, "--epochs", "2")
        assert (result["state"], result["records_counted_once"]) == ("done", True)
        assert rate_of_rows(endpoint) == (0.05, 2)
        said = (folder / "stderr").read_text().splitlines()
        lines = [line for line in said if "goes on with learning_rate: 0.1 -> 0.05" in line]
        # One for the rows and one for the dense parameters, and none of both workers' twice.
        assert len(lines) == len(set(lines)) == 2, said
        # What is set by hand stays, as long as the model file does not ask for something else.
        ctl = [sys.executable, "-m", "backstay.pserver.ctl.cli", "--endpoint", endpoint]
        name = lines[0].split("'")[1]
        subprocess.run([*ctl, "tables", "set", name, "learning_rate=0.5"], check=True)
        assert run(folder, *command, "--epochs", "3")["state"] == "done"
        assert rate_of_rows(endpoint) == (0.5, 3)
        # Evaluation changes nothing, whatever its model file says.
        model.write_text(MODEL.replace("lr=0.1", "lr=0.01"))
        judged = run(folder, "evaluate", "job.yaml", "--endpoint", endpoint, "--json")
        assert judged["state"] == "done"
        assert rate_of_rows(endpoint) == (0.5, 3)
        # Another optimizer has other rows.
        model.write_text(MODEL.replace("torch.optim.SGD", "torch.optim.Adam"))
        refused = run_to_its_end(folder, *command, "--epochs", "4")
        assert refused.returncode != 0
        assert "optimizer: sgd there, adam asked for" in refused.stderr + refused.stdout


def test_a_job_with_its_own_servers_goes_on_with_another_learning_rate(folder: Path) -> None:
    command = ("train", "job.yaml", "--servers", "1", "--json")
    close(folder, "evaluation")
    with started(folder, *command) as process:
        wait_until(lambda: shown(folder).get("checkpoint"))
        process.send_signal(signal.SIGINT)
        assert result_of(folder, process)["state"] == "stopped"
    open_gate(folder, "evaluation")
    (folder / "model.py").write_text(MODEL.replace("lr=0.1", "lr=0.05"))
    result = run(folder, *command)
    assert (result["state"], result["records_counted_once"]) == ("done", True)
    assert "goes on with learning_rate: 0.1 -> 0.05" in (folder / "stderr").read_text()
