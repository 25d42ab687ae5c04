"""The programs that the benchmark runs: how each is built, installed and started.

Each contestant runs in processes of its own and prints its figures as the last JSON line of its
output. Imports the standard library and bench.figures; it measures nothing itself.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProgramFailed", "Unavailable", "Workshop", "describe_machine", "run_program"]

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
RUN_DEADLINE_S = 300.0
INSTALL_DEADLINE_S = 900.0
PEERS = {
    "paddle": ("paddlepaddle==2.6.2", "numpy<2", "protobuf==3.20.3", "setuptools"),
    "tensorflow": ("tensorflow-cpu>=2.16",),
}
# Newest first; the wheels of paddlepaddle 2.6.2 end at 3.12.
PEER_PYTHONS = ("python3.12", "python3.11", "python3.10", "python3.9")


class ProgramFailed(Exception):
    """A contestant ended with an error or printed no figures; the message says which and how."""


class Unavailable(Exception):
    """A contestant cannot be had on this machine; the message says why."""


def run_program(command: list[str], deadline_s: float = RUN_DEADLINE_S) -> dict[str, float]:
    """Run a contestant to its end and return its figures.

    It gets a process group of its own: whatever it started is killed with it at the deadline.

    Raises:
        ProgramFailed: It failed, took longer than the deadline or printed no JSON line.
    """
    name = " ".join(Path(word).name for word in command[:3])
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise ProgramFailed(f"{name}: not done after {deadline_s:.0f} s") from None
        finally:
            kill_group(process.pid)
    if process.returncode != 0:
        raise ProgramFailed(f"{name}: exit code {process.returncode}\n{errors[-2000:]}")
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            figures: dict[str, float] = json.loads(line)
            return figures
    raise ProgramFailed(f"{name}: no JSON line in its output\n{output[-500:]}{errors[-1500:]}")


def kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of them have ended by themselves


@dataclass
class Workshop:
    """Where built programs and the peers' environments are kept, between runs too."""

    folder: Path

    def compiled(self, name: str) -> str:
        """Return the path of ``bench/<name>.rs``, compiled for this machine.

        Raises:
            Unavailable: There is no Rust compiler, or it fails.
        """
        source, program = HERE / f"{name}.rs", self.folder / "bin" / name
        if program.exists() and program.stat().st_mtime >= source.stat().st_mtime:
            return str(program)
        if shutil.which("rustc") is None:
            raise Unavailable(f"{name} needs rustc to be built, and there is none on PATH")
        program.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-O", "-C", "target-cpu=native", "--edition", "2021"]
        built = subprocess.run(
            ["rustc", *flags, str(source), "-o", str(program)], capture_output=True, text=True
        )
        if built.returncode != 0:
            raise Unavailable(f"{name} does not compile:\n{built.stderr[-2000:]}")
        return str(program)

    def peer_python(self, peer: str) -> str:
        """Return the interpreter of a peer's own environment, made at first use.

        Raises:
            Unavailable: No fitting Python, or the packages cannot be installed.
        """
        environment = self.folder / f"venv-{peer}"
        python, complete = environment / "bin" / "python", environment / "complete"
        if complete.exists():
            return str(python)
        base = next((found for found in map(shutil.which, PEER_PYTHONS) if _runs(found)), None)
        if base is None:
            raise Unavailable(f"{peer} needs one of {', '.join(PEER_PYTHONS)} on PATH")
        print(f"installing {', '.join(PEERS[peer])} into {environment} (once)", file=sys.stderr)
        for command in (
            [base, "-m", "venv", "--clear", str(environment)],
            [str(python), "-m", "pip", "install", "--quiet", *PEERS[peer]],
        ):
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S
                )
            except subprocess.TimeoutExpired:
                raise Unavailable(f"{peer}: not installed after {INSTALL_DEADLINE_S} s") from None
            if done.returncode != 0:
                raise Unavailable(f"{peer} cannot be installed:\n{done.stderr[-1000:]}")
        complete.touch()
        return str(python)


def _runs(python: str | None) -> bool:
    """Whether an interpreter works: on PATH may stand one that only says how to choose another."""
    return (
        python is not None
        and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
    )


def describe_machine() -> str:
    """One line: cores, processor, kernel, memory, Python."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores of {model} ({platform.machine()}), {memory:.0f} GiB, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    )
