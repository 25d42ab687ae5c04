"""A job with TLS, the processes of which have a certificate without their addresses, as Pods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from backstay.job_spec import DataSpec, JobSpec, ModeSpec
from backstay.pserver.local_cluster import LocalCluster
from tests.integration.job_processes import JobProcesses
from tests.integration.tiny_jobs import write_clicks, write_model

TOKEN = "a-secret-of-many-characters"
NAME = "jobs.example"


@dataclass(frozen=True)
class Certificate:
    """Settings of a process with a certificate for one host."""

    tls_ca_file: str
    tls_cert_file: str
    tls_key_file: str

    @classmethod
    def issued(cls, authority: trustme.CA, folder: Path, host: str) -> Certificate:
        issued = authority.issue_cert(host)
        files = {one: folder / f"{one}-{host}.pem" for one in ("ca", "cert", "key")}
        authority.cert_pem.write_to_path(files["ca"])
        files["cert"].write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(files["key"])
        return cls(*map(str, files.values()))

    def settings(self) -> dict[str, object]:
        return vars(self)

    def environment(self) -> dict[str, str]:
        return {f"BACKSTAY_{name.upper()}": value for name, value in vars(self).items()}


def test_workers_reach_job_master_and_each_other_by_the_name_in_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    servers = Certificate.issued(authority, tmp_path, "127.0.0.1")
    job = Certificate.issued(authority, tmp_path, NAME)
    spec = JobSpec(
        name="guarded",
        model=str(write_model(tmp_path, "torch")),
        training=DataSpec(paths=(str(write_clicks(tmp_path / "train.csv", 2000)),)),
        batch_size=50,
        records_per_task=500,
        # Its workers call each other.
        mode=ModeSpec(kind="sync"),
    )
    settings: dict[str, Any] = {"slot_count": 16, "token": TOKEN, **servers.settings()}
    with LocalCluster(servers=1, settings=settings) as cluster:
        monkeypatch.setenv("BACKSTAY_JOB_TLS_NAME", NAME)
        variables = {"BACKSTAY_TOKEN": TOKEN, "BACKSTAY_JOB_TLS_NAME": NAME, **job.environment()}
        with JobProcesses(cluster, spec, tmp_path, **variables) as processes:
            for worker in ("w-0", "w-1"):
                processes.start_worker(worker)
            processes.until(lambda status: len(status.workers) == 2 or status.state == "done")
            assert processes.over().state == "done"
