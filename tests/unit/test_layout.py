"""The repository is laid out as docs/adr/0001-layout.md says."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gates

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("checkpoint", "consensus", "master", "pserver", "trainer")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_refuses_to_be_imported_under_its_short_name(folder: str) -> None:
    # python -m pytest puts the repository's root on sys.path, where the folder is found too.
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert f"backstay.{folder}" in done.stderr


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_import_root_holds_a_relative_link_to_the_folder(folder: str) -> None:
    link = ROOT / "src" / "backstay" / folder
    assert link.is_symlink(), f"{link} is not a link (was the repository unpacked from a .zip?)"
    assert os.readlink(link) == f"../../{folder}"
    assert (ROOT / folder / "__init__.py").is_file()


@pytest.mark.parametrize("folder", ["proto", "deploy"])
def test_folders_that_are_not_packages_hold_no_python(folder: str) -> None:
    assert not list((ROOT / folder).rglob("*.py"))


def test_tests_are_not_a_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_crate_takes_the_lints_of_the_workspace() -> None:
    crates = sorted((ROOT / "crates").glob("*/Cargo.toml"))
    assert len(crates) >= 3
    for manifest in crates:
        text = manifest.read_text(encoding="utf-8")
        assert re.search(r"^\[lints\]\s*\nworkspace = true", text, re.MULTILINE), manifest


def test_the_core_depends_on_no_runtime_no_binding_and_no_randomness() -> None:
    done = subprocess.run(
        ["cargo", "tree", "-p", "backstay-core", "--edges", "normal", "--prefix", "none"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert "backstay-core" in names
    refused = {"tokio", "pyo3", "numpy", "rand", "rand_core", "getrandom", "mio", "chrono", "time"}
    assert not names & refused


def test_metadata_names_each_command_and_its_function_exists() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["options.entry_points"]["console_scripts"].split("\n")
    commands = dict(re.split(r"\s*=\s*", line) for line in lines if line)
    assert set(commands) == {"pserver", "pserverctl", "backstay"}
    for target in commands.values():
        module, _, function = target.partition(":")
        source = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
        if not source.exists():
            source = source.with_suffix("") / "__init__.py"
        assert re.search(rf"^def {function}\b", source.read_text(encoding="utf-8"), re.MULTILINE)
