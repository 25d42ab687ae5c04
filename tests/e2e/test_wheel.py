"""The wheel: one file for all Pythons, holding backstay only, usable away from the repository."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = """
import sys
import backstay, backstay._native, backstay.consensus, backstay.pserver, backstay.trainer
for name in ("pserver", "trainer", "consensus", "proto", "tests"):
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(f"the wheel installs a top-level module {name}")
simulator = [name for name in vars(backstay._native) if name.startswith("Sim")]
if simulator:
    sys.exit(f"the wheel has the simulator's {simulator}")
print(backstay.__version__, backstay.__file__, backstay._native.PROTOCOL_VERSION)
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run("make", "wheel", f"DIST={folder}", cwd=ROOT)
    wheels = list(folder.glob("*.whl"))
    assert len(wheels) == 1
    return wheels[0]


def test_one_wheel_serves_every_python_from_3_10_on(wheel: Path) -> None:
    assert "-cp310-abi3-" in wheel.name


def test_the_wheel_holds_backstay_and_its_metadata_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"backstay"}
    for expected in (
        "backstay/py.typed",
        "backstay/_native.pyi",
        "backstay/_native.abi3.so",
        "backstay/pserver/__init__.py",
        "backstay/trainer/__init__.py",
        "backstay/consensus/__init__.py",
    ):
        assert expected in names
    committed = {
        path.relative_to(ROOT / folder).as_posix()
        for folder in ("pserver", "trainer", "consensus", "master", "checkpoint")
        for path in (ROOT / folder).rglob("*.py")
    }
    packed = {name.split("/", 2)[2] for name in names if name.count("/") > 1}
    assert committed <= packed


def test_the_wheel_works_in_a_fresh_environment_outside_of_the_repository(
    wheel: Path, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    output = run(python, "-c", PROGRAM, cwd=tmp_path)
    assert str(venv) in output
    for command in ("pserver", "pserverctl", "backstay"):
        assert "Usage" in run(venv / "bin" / command, "--help", cwd=tmp_path)
