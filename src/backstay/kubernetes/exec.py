"""Runs ``backstay jobs`` in the job master's Pod, where the cluster's addresses are known."""

from __future__ import annotations

from typing import NamedTuple

from backstay.errors import JobRefused
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.master_pod import master_pod
from backstay.kubernetes.names import MASTER

__all__ = ["ExecResult", "run_in_master"]


class ExecResult(NamedTuple):
    """What a command in the job master's Pod has printed, and its exit code."""

    output: str
    errors: str
    exit_code: int


def run_in_master(api: KubernetesApi, job: str, words: list[str]) -> ExecResult:
    """Run ``backstay jobs`` in the job master's Pod, where the cluster's addresses are known.

    Raises:
        JobRefused: No Pod of the job master runs now.
        KubernetesError: The API refuses it.
    """
    pod = master_pod(api, job)
    if not pod.name or pod.trouble:
        raise JobRefused(f"job {job!r} has no job master now: {pod.trouble or 'its Pod is gone'}")
    command = ["python3", "-m", "backstay.cli", "jobs", *words]
    return ExecResult(*api.run_in_pod(pod.name, MASTER, command))
