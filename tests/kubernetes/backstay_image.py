"""The image ``localhost/backstay:test``: this interpreter, this checkout and what it requires.

Its containers run as a user that is not root, and need no writable root file system; HOME is
/tmp, where a Pod mounts an ``emptyDir`` if it writes. No framework is in it: they are too large
to copy for each run. A Pod that trains mounts ``frameworks()`` of this machine at /opt/frameworks,
which is on PYTHONPATH.
"""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution, distribution
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement

from tests.kubernetes.build import cache_folder, prune
from tests.kubernetes.images import ImageConfig, Layer, write_image

__all__ = ["FRAMEWORKS_FOLDER", "IMAGE", "USER_ID", "add_package", "backstay_image", "frameworks"]

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/backstay:test"
USER_ID = 10001
PACKAGES_FOLDER = "opt/backstay"
FRAMEWORKS_FOLDER = "/opt/frameworks"
EXTRAS = ("kubernetes",)
LDD_LIMIT_S = 120.0
# What Debian's images have; `kubectl cp` calls tar.
PROGRAMS = ("sh", "sleep", "tar")
LIBRARIES = Path("/lib/x86_64-linux-gnu")
# Frameworks need them, and nothing in the image itself.
FRAMEWORKS_NEED = (
    "libdl.so.2",
    "libgcc_s.so.1",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
    "libutil.so.1",
)
# Parts of the standard library and of packages that no program of ours imports.
LEFT_OUT = {"ensurepip", "idlelib", "site-packages", "dist-packages", "test", "tests", "turtledemo"}
# The asynchronous twin of the client, 70 MB.
UNUSED = "kubernetes/aio/"
SCRIPT = """#!/usr/local/bin/python3
import sys

from {module} import {function}

sys.exit({function}())
"""


def backstay_image() -> Path:
    """Return the image's tar file, written if something in it has changed."""
    layer = Layer()
    _add_system(layer)
    _add_interpreter(layer)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    _add_requirements(layer, setup)
    _add_backstay(layer, setup)
    config = ImageConfig(
        environment=(
            f"PYTHONPATH=/{PACKAGES_FOLDER}:{FRAMEWORKS_FOLDER}",
            "PYTHONDONTWRITEBYTECODE=1",
            "PYTHONUNBUFFERED=1",
            "HOME=/tmp",
        ),
        user=f"{USER_ID}:{USER_ID}",
        working_folder="/tmp",
    )
    path = cache_folder() / f"backstay-{layer.digest()[:16]}.tar"
    if not path.exists():
        _add_shared_libraries(layer)
        write_image(path, IMAGE, layer, config)
    path.touch()
    prune("backstay-*.tar")
    return path


def frameworks() -> Path:
    """Return the folder of this machine that has torch and paddle, as far as they are installed."""
    for name in ("torch", "paddlepaddle"):
        try:
            return Path(str(distribution(name).locate_file("")))
        except ImportError:
            continue
    raise LookupError("neither torch nor paddle is installed here")


def _add_system(layer: Layer) -> None:
    for name in ("bin", "lib", "lib64", "sbin"):
        layer.folder(f"usr/{name}")
        layer.link(name, f"usr/{name}")
    for name in ("dev", "etc", "opt", "proc", "run", "sys", "usr/local/bin", "var"):
        layer.folder(name)
    layer.folder("tmp", mode=0o1777)
    layer.text("etc/passwd", f"backstay:x:{USER_ID}:{USER_ID}::/tmp:/bin/sh\n")
    layer.text("etc/group", f"backstay:x:{USER_ID}:\n")
    layer.text("etc/nsswitch.conf", "hosts: files dns\n")
    for name in PROGRAMS:
        layer.file(f"usr/bin/{name}", Path("/bin") / name)
    for library in FRAMEWORKS_NEED:
        layer.file(_inside(LIBRARIES / library), LIBRARIES / library)


def _add_interpreter(layer: Layer) -> None:
    """At the path that it has here: it looks for its library and modules relative to that."""
    program = Path(sys.executable).resolve()
    layer.file(_inside(program), program)
    layer.link("usr/local/bin/python3", str(program))
    library = Path(sysconfig.get_path("stdlib"))
    layer.tree(
        _inside(library),
        library,
        lambda path: (
            path.name in LEFT_OUT or path.name.startswith("config-") or path.suffix == ".a"
        ),
    )


def _add_requirements(layer: Layer, setup: configparser.ConfigParser) -> None:
    """Copy the installed packages that setup.cfg requires, and what they require."""
    lines = setup["options"]["install_requires"].splitlines()
    for extra in EXTRAS:
        lines += setup["options.extras_require"][extra].splitlines()
    waiting = [Requirement(line) for line in lines if line and not line.startswith("#")]
    done: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        # An extra can bring a package's own requirements in once more.
        for extra in {"", *requirement.extras}:
            wanted = (re.sub(r"[-_.]+", "-", requirement.name).lower(), extra)
            if wanted in done or not _applies(requirement, ""):
                continue
            done.add(wanted)
            package = distribution(requirement.name)
            add_package(layer, package)
            needs = [Requirement(line) for line in package.requires or ()]
            waiting += [need for need in needs if _applies(need, extra)]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def add_package(layer: Layer, package: Distribution) -> None:
    """Copy the files of an installed package, and what Python has compiled of them."""
    for file in package.files or ():
        parts = set(file.parts)
        if ".." in parts or parts & LEFT_OUT or str(file).startswith(UNUSED):
            continue
        source = Path(str(package.locate_file(file)))
        if source.is_file():
            layer.file(f"{PACKAGES_FOLDER}/{file}", source)
        # uv compiles a module, and does not list what comes of it.
        compiled = Path(cache_from_source(source))
        if source.suffix == ".py" and compiled.is_file():
            name = file.parent / compiled.parent.name / compiled.name
            layer.file(f"{PACKAGES_FOLDER}/{name}", compiled)


def _add_backstay(layer: Layer, setup: configparser.ConfigParser) -> None:
    layer.tree(
        f"{PACKAGES_FOLDER}/backstay",
        ROOT / "src" / "backstay",
        lambda path: path.name == "__pycache__",
    )
    for line in setup["options.entry_points"]["console_scripts"].split("\n"):
        if line:
            name, _, target = (part.strip() for part in line.partition("="))
            module, _, function = target.partition(":")
            text = SCRIPT.format(module=module, function=function)
            layer.text(f"usr/local/bin/{name}", text, mode=0o755)


def _add_shared_libraries(layer: Layer) -> None:
    """Add what the programs and extension modules are linked to, at the paths it has here."""
    binaries = [
        str(path)
        for path in layer.sources()
        if ".so" in path.suffixes or path.name in PROGRAMS or path == Path(sys.executable).resolve()
    ]
    done = subprocess.run(
        ["ldd", *binaries], capture_output=True, text=True, timeout=LDD_LIMIT_S, check=False
    )
    there = {str(path) for path in layer.sources()}
    for library in sorted(set(re.findall(r"^\t(?:\S+ => )?(/\S+) \(", done.stdout, re.MULTILINE))):
        if str(Path(library).resolve()) not in there and library not in there:
            layer.file(_inside(Path(library)), Path(library))


def _inside(path: Path) -> str:
    """Name a file of this machine in the image; the first part may be a link there."""
    name = str(path).lstrip("/")
    return f"usr/{name}" if name.split("/")[0] in {"bin", "lib", "lib64", "sbin"} else name
