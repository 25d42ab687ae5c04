"""A job on folders that are closed one after the other: each record once, whoever dies."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from backstay.master.job_client import JobClient
from backstay.pserver.local_cluster import LocalCluster
from tests.integration.counting_worker import keep_all_checkpoints, restore
from tests.integration.stream_command import Command, trained_here, until
from tests.integration.tiny_jobs import write_clicks, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
pytest.importorskip("torch")

RECORDS = 130
JOB = """\
name: clicks
model: {model}
training:
  kind: csv
  paths: ["clicks/*/*"]
  options: {{look_s: 0.2}}
period: {{folders: 2, ahead_records: 1000}}
records_per_task: 50
batch_size: 25
audit: true
workers: 2
checkpoint: none
"""


def close_folder(root: Path, number: int) -> None:
    """Write a folder of an hour, and close it."""
    folder = root / "clicks" / f"2026-11-{number // 24 + 1:02}" / f"{number % 24:02}"
    folder.mkdir(parents=True)
    for part in range(2):
        lines = [
            f"{n % 1000},{n % 50},{n % 2}" for n in range(RECORDS * part, RECORDS * (part + 1))
        ]
        text = "\n".join(["user,ad,click", *lines, ""])
        (folder / f"part-{part}.csv").write_text(text)
    (folder / "_SUCCESS").touch()


class Closing:
    """Closes one folder after the other until it is told to stop."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Closing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for number in itertools.count():
            # A pause, so that the job is faster.
            if self._stop.wait(1.0):
                return
            close_folder(self.root, number)
            self.count += 1


def prepared(tmp_path: Path, text: str) -> None:
    model = write_model(tmp_path, "torch").name
    (tmp_path / "job.yaml").write_text(text.format(model=model))


def taken_all(client: JobClient, command: Command, folders: int) -> None:
    """Wait until all records of so many folders are done."""
    until(
        client,
        command,
        lambda one: (
            one.examples >= folders * 2 * RECORDS
            and not one.stream.waiting_folders
            and one.stream.HasField("lag_records")
            and not one.stream.lag_records
        ),
    )


def assert_counted(command: Command, folders: int) -> None:
    found = json.loads(command.jobs("audit", "clicks", "--json"))
    assert found["records_counted_once"] is True, found
    assert found["records"] == found["right"] == folders * 2 * RECORDS, found


def test_a_job_on_folders_that_are_closed_counts_each_record_once_whoever_dies(
    tmp_path: Path,
) -> None:
    prepared(tmp_path, JOB)
    with LocalCluster(2) as cluster:
        command = Command(tmp_path, cluster.endpoints)
        client = JobClient(cluster.endpoints, "clicks", config=cluster.client_config())
        command.start()
        try:
            with Closing(tmp_path) as closing:
                begun = until(client, command, lambda one: one.examples >= 1000)
                command.child("backstay.trainer.worker.cli").kill()
                more = until(client, command, lambda one: one.examples >= begun.examples + 1000)
                command.child("master.serve_cli").kill()
                until(
                    client,
                    command,
                    lambda one: one.master_starts > 1 and one.examples >= more.examples + 1000,
                )
            taken_all(client, command, closing.count)
            newest = sorted((tmp_path / "clicks").glob("*/*"))[-1]
            (newest / "late.csv").write_text("user,ad,click\n1,1,1\n")
            until(client, command, lambda one: str(newest) in one.trouble)
            assert "stopping" in command.jobs("stop", "clicks")
            code, result = command.ended()
            assert (code, result["state"]) == (130, "stopped"), command.said()
            assert_counted(command, closing.count)

            # The same command goes on.
            close_folder(tmp_path, closing.count)
            command.start()
            taken_all(client, command, closing.count + 1)
            command.jobs("stop", "clicks")
            command.ended()
            assert_counted(command, closing.count + 1)
        finally:
            command.kill()
            client.close()


def test_a_restore_takes_a_job_back_to_the_records_of_the_checkpoint(
    tmp_path: Path, eventually: Any
) -> None:
    text = JOB.replace("checkpoint: none", "checkpoint: {{every: pass, every_tasks: 7}}")
    export = f"{sys.executable} -m backstay.cli export checkpoints served/$BACKSTAY_JOB_PASS"
    prepared(tmp_path, text + f'hooks: {{{{each_pass: ["{export}"]}}}}\n')
    settings = {"slot_count": 16, "checkpoint_url": str(tmp_path / "checkpoints")}
    with LocalCluster(2, settings=settings) as cluster:
        keep_all_checkpoints(cluster)
        command = Command(tmp_path, cluster.endpoints)
        client = JobClient(cluster.endpoints, "clicks", config=cluster.client_config())
        command.start()
        try:
            with Closing(tmp_path) as closing:
                begun = until(client, command, lambda one: bool(one.checkpoint))
                newest = until(
                    client, command, lambda one: one.checkpoint not in ("", begun.checkpoint)
                )
                until(client, command, lambda one: one.examples >= newest.examples + 1000)
                restore(cluster, newest.checkpoint, eventually)
                until(client, command, lambda one: one.went_back == 1)
            taken_all(client, command, closing.count)
            command.jobs("stop", "clicks")
            code, result = command.ended()
            assert (code, result["went_back"]) == (130, 1), command.said()
            assert_counted(command, closing.count)
        finally:
            command.kill()
            client.close()
    # The full model at the end of periods.
    exports = sorted(int(path.parent.name) for path in tmp_path.glob("served/*/export.json"))
    assert len(exports) > 1, command.said()


def test_a_job_in_one_process_trains_on_folders_and_evaluates_after_each(tmp_path: Path) -> None:
    write_clicks(tmp_path / "held.csv", 100)
    text = JOB.replace("audit: true", "max_steps: 40\nvalidation: held.csv")
    prepared(tmp_path, text.replace("folders: 2", "folders: 1"))
    with Closing(tmp_path):
        result = trained_here(tmp_path)
    assert result["state"] == "done"
    # Two files of three tasks, two, two and two batches: 12 steps for each folder.
    assert [one["step"] for one in result["evaluations"]] == [12, 24, 36, 40], result
