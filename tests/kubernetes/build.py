"""Builds the programs of the Kubernetes cluster, once for each state of their sources.

``python3 -m tests.kubernetes.build`` installs the Debian packages that are missing, compiles
``cluster/`` and ``pause.c`` into a folder of the cache, and prints that folder. It does nothing
where this is done. The Go compiler takes about ten minutes of two cores when its own cache is
empty, and a quarter of a minute otherwise.

Imports the standard library only: CI starts it before there is a virtual environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kubernetes.images import ImageConfig, Layer, write_image

__all__ = [
    "SKIP_VARIABLE",
    "CannotRun",
    "build",
    "built_programs",
    "cache_folder",
    "prune",
    "skips",
    "what_is_missing",
]

HERE = Path(__file__).resolve().parent
# Programs of backstay take variables that begin with BACKSTAY_ for settings, and warn of others.
CACHE_VARIABLE = "KUBERNETES_TESTS_CACHE"
# "skip": a machine that cannot run the cluster leaves its tests out, and says so.
SKIP_VARIABLE = "KUBERNETES_TESTS"
# Debian's package for each program that the cluster calls.
PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
PARTS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-dns",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
)
PAUSE_IMAGE = "localhost/pause:1"
# The linker would throw debug data away: not writing them saves a third of the compiler's time.
COMPILE_FLAGS = ("-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false")
BUILD_LIMIT_S = 3600.0
APT_LIMIT_S = 600.0
PROGRESS_EVERY_S = 60.0
LOCK_PAUSE_S = 1.0
# What other checkouts use stays; what nobody used for longest goes.
KEPT_BUILDS = 3


class CannotRun(Exception):
    """This machine cannot run the cluster; the message says why and what to do."""


def cache_folder() -> Path:
    """Return the folder for what is built, outside of the checkout."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "backstay-kubernetes"


def skips() -> bool:
    """Whether the user lets tests be skipped where the cluster cannot run."""
    return os.environ.get(SKIP_VARIABLE) == "skip"


def what_is_missing() -> list[str]:
    """Return one sentence for each thing that keeps a cluster from running here."""
    missing = []
    if sys.platform != "linux" or platform.machine() != "x86_64":
        missing.append("The cluster runs on Linux on x86-64 only.")
    if os.geteuid() != 0:
        missing.append("The cluster makes cgroups, mounts and a bridge: run this as root.")
    packages = sorted(missing_packages())
    if packages:
        missing.append(f"Debian packages are missing: apt-get install {' '.join(packages)}.")
    return missing


def missing_packages() -> set[str]:
    """Return Debian's names of the packages whose programs are not here."""
    return {package for program, package in PACKAGES.items() if shutil.which(program) is None}


def built_programs() -> Path | None:
    """Return the folder with the programs of these sources, or None if they are not built."""
    folder = cache_folder() / f"programs-{_key()}"
    return folder if folder.is_dir() else None


def prune(pattern: str, kept: int = KEPT_BUILDS) -> None:
    """Remove all but the newest results of this name from the cache."""
    results = sorted(cache_folder().glob(pattern), key=lambda path: path.stat().st_mtime)
    for path in results[:-kept]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def build() -> Path:
    """Install and build what is missing, and return the folder with the programs.

    Raises:
        CannotRun: Something is missing that this cannot install.
    """
    _install_packages()
    missing = what_is_missing()
    if missing:
        raise CannotRun("\n".join(missing))
    cache_folder().mkdir(parents=True, exist_ok=True)
    with _build_lock():
        folder = built_programs()
        if folder is None:
            # It gets its name when it is whole.
            aside = cache_folder() / "building"
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            _compile(aside)
            _make_pause_image(aside)
            folder = aside.rename(cache_folder() / f"programs-{_key()}")
        folder.touch()
        prune("programs-*")
    return folder


def _key() -> str:
    """Name a state of the sources: sixteen hexadecimal digits."""
    digest = hashlib.sha256(repr(COMPILE_FLAGS).encode())
    for path in (*sorted((HERE / "cluster").iterdir()), HERE / "pause.c"):
        digest.update(f"\0{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _install_packages() -> None:
    packages = sorted(missing_packages())
    if not packages or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    print(f"installing Debian packages: {' '.join(packages)}", flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    waiting = ["-q", "-o", "DPkg::Lock::Timeout=300"]
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        subprocess.run(
            ["apt-get", *waiting, *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
            timeout=APT_LIMIT_S,
            check=True,
        )


@contextmanager
def _build_lock() -> Iterator[None]:
    """Let only one process build; another one waits and says so."""
    with (cache_folder() / "build.lock").open("w") as file:
        begun = time.monotonic()
        told = begun - PROGRESS_EVERY_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if now > begun + BUILD_LIMIT_S:
                    raise CannotRun(f"Another build holds {file.name} for an hour.") from None
                if now > told + PROGRESS_EVERY_S:
                    told = now
                    print(f"waiting for another build, {now - begun:.0f} s", flush=True)
                time.sleep(LOCK_PAUSE_S)
        yield


def _go() -> str:
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        raise CannotRun(
            "No go found: the cluster is compiled by Go 1.24 or newer (https://go.dev/dl)."
        )
    return go


def _link_flags() -> str:
    """Without them the programs would call themselves version 0.0.0, and kubelets be refused."""
    found = re.search(r"^\s*k8s\.io/kubernetes (v1\.(\d+)\.\S+)", _module_file(), re.MULTILINE)
    assert found, "cluster/go.mod names no version of k8s.io/kubernetes"
    version, minor = found.groups()
    settings = {"gitVersion": version, "gitMajor": "1", "gitMinor": minor, "gitTreeState": "clean"}
    package = "k8s.io/component-base/version"
    return " ".join(
        ["-s", "-w", *(f"-X {package}.{name}={value}" for name, value in settings.items())]
    )


def _module_file() -> str:
    return (HERE / "cluster" / "go.mod").read_text(encoding="utf-8")


def _compile(folder: Path) -> None:
    """Compile the one program, and link it to the name of each part."""
    command = [_go(), "build", "-v", *COMPILE_FLAGS, f"-ldflags={_link_flags()}"]
    process = subprocess.Popen(
        [*command, "-o", str(folder / "kubernetes"), "."],
        cwd=HERE / "cluster",
        env=os.environ | {"GOFLAGS": "-mod=readonly", "CGO_ENABLED": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    limit = threading.Timer(BUILD_LIMIT_S, process.kill)
    limit.start()
    begun = told = time.monotonic()
    lines: deque[str] = deque(maxlen=40)
    assert process.stderr is not None
    # With -v each line is the name of a package that is compiled.
    for packages, line in enumerate(process.stderr, 1):
        lines.append(line)
        now = time.monotonic()
        if now > told + PROGRESS_EVERY_S:
            told = now
            print(f"compiling Kubernetes: {packages} packages, {now - begun:.0f} s", flush=True)
    status = process.wait()
    limit.cancel()
    if status != 0:
        raise CannotRun(f"go build ended with {status}; its last lines:\n{''.join(lines)}")
    for part in PARTS:
        (folder / part).symlink_to("kubernetes")


def _make_pause_image(folder: Path) -> None:
    program = folder / "pause"
    subprocess.run(
        ["cc", "-Os", "-static", "-s", "-o", str(program), str(HERE / "pause.c")], check=True
    )
    layer = Layer()
    layer.file("pause", program)
    write_image(folder / "pause.tar", PAUSE_IMAGE, layer, ImageConfig(entrypoint=("/pause",)))


if __name__ == "__main__":
    try:
        print(build())
    except (CannotRun, subprocess.SubprocessError, OSError) as error:
        print(f"The Kubernetes cluster for tests cannot be built here:\n{error}", file=sys.stderr)
        if not skips():
            sys.exit(f"{SKIP_VARIABLE}=skip leaves out the tests that need it.")
