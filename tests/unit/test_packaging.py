"""What setup.cfg asks for fits what is committed."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.version import Version

pytestmark = pytest.mark.gates

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "src" / "backstay" / "_proto"
LOCKS = ROOT / "requirements"
# What setup.cfg promises, and what the locks are for.
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
SYSTEMS = {"linux": "Linux", "darwin": "Darwin"}


# Imports what the demos run, where only packages that are named are there.
DEMOS = """
import importlib, sys
from importlib.metadata import packages_distributions

named, modules = (text.split() for text in sys.argv[1:])
others = {
    top for top, packages in packages_distributions().items()
    if not {package.lower().replace("_", "-") for package in packages} & {*named, "backstay"}
}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in others:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for module in modules:
    importlib.import_module(module)
"""
DEMO_MODULES = (
    "examples.census.demo",
    "examples.online.demo",
    "examples.online.website",
    "backstay.cli",
    "backstay.pserver.serve_cli",
    "backstay.trainer.paddle.framework",
)


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def requirements(section: str, key: str) -> dict[str, Requirement]:
    """The requirements in a setting of setup.cfg, by name."""
    lines = [line for line in setup_cfg()[section][key].splitlines() if line.strip()]
    return {one.name: one for one in map(Requirement, lines)}


def groups() -> list[dict[str, Requirement]]:
    """What backstay requires, then what each of its extras does."""
    extras = [
        requirements("options.extras_require", extra)
        for extra in setup_cfg()["options.extras_require"]
    ]
    return [requirements("options", "install_requires"), *extras]


def lower_bound(requirement: Requirement) -> Version:
    (bound,) = (one.version for one in requirement.specifier if one.operator == ">=")
    return Version(bound)


def environments() -> list[dict[str, str]]:
    """What markers ask about, for each Python and system that the locks are for."""
    return [
        {str(name): str(value) for name, value in default_environment().items()}
        | {"python_version": python, "python_full_version": f"{python}.9"}
        | {"sys_platform": platform, "platform_system": system}
        for python, (platform, system) in product(PYTHONS, SYSTEMS.items())
    ]


def lock(name: str) -> list[str]:
    """The lines of a lock without their comments."""
    lines = (LOCKS / name).read_text(encoding="utf-8").splitlines()
    return [line for line in (line.partition("#")[0].rstrip() for line in lines) if line]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions_in_generated_code(pattern: str) -> set[Version]:
    texts = [path.read_text(encoding="utf-8") for path in GENERATED.rglob("*.py")]
    return {Version(found) for text in texts for found in re.findall(pattern, text)}


@pytest.mark.parametrize(
    ("package", "pattern"),
    [
        ("protobuf", r"Protobuf Python Version: ([\d.]+)"),
        ("grpcio", r"GRPC_GENERATED_VERSION = '([\d.]+)'"),
    ],
)
def test_lower_bounds_are_what_the_generated_code_demands(package: str, pattern: str) -> None:
    # Generated code refuses to be imported under a runtime older than its generator.
    demanded = versions_in_generated_code(pattern)
    assert demanded == {lower_bound(requirements("options", "install_requires")[package])}


def test_every_requirement_has_a_lower_bound_or_a_pin() -> None:
    for group in groups():
        for requirement in group.values():
            assert {one.operator for one in requirement.specifier} & {">=", "=="}, requirement


def test_the_lock_has_every_requirement_once_and_within_its_range() -> None:
    pins = defaultdict(list)
    for line in lock("all.txt"):
        pin = Requirement(line)
        pins[pin.name].append(pin)
    for environment, group in product(environments(), groups()):
        for name, requirement in group.items():
            if requirement.marker is not None and not requirement.marker.evaluate(environment):
                continue
            versions = [
                str(pin.specifier).removeprefix("==")
                for pin in pins[canonical(name)]
                if pin.marker is None or pin.marker.evaluate(environment)
            ]
            where = f"{requirement} on {environment['sys_platform']}: run `make lock`"
            assert len(versions) == 1, where
            assert requirement.specifier.contains(versions[0]), where


def test_the_demos_take_a_part_of_the_lock_with_all_that_backstay_requires() -> None:
    demo, pins = (
        {pin.partition(" ;")[0] for pin in lock(f"{name}.txt")} for name in ("demo", "all")
    )
    assert demo < pins, "run `make lock`"
    names = {pin.partition("==")[0] for pin in demo}
    assert {canonical(name) for name in requirements("options", "install_requires")} <= names
    assert not names & {"torch", "mypy", "pytest", "moto"}


@pytest.mark.paddle
def test_the_demos_need_no_more_than_they_install() -> None:
    names = " ".join(Requirement(line).name for line in lock("demo.txt"))
    command = [sys.executable, "-c", DEMOS, names, " ".join(DEMO_MODULES)]
    # Not all of sys.path: setuptools adds what it carries along there, once it is imported.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_locks_pin_versions_and_name_no_host() -> None:
    for line in lock("all.txt"):
        assert re.fullmatch(r"[a-z0-9-]+==[\w.]+( ; [^:/@]+)?", line), line


def test_the_versions_of_python_and_rust_agree() -> None:
    python = (ROOT / "src" / "backstay" / "_version.py").read_text(encoding="utf-8")
    rust = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    python_version = re.search(r'__version__ = "([\d.]+)"', python)
    rust_version = re.search(r'^version = "([\d.]+)"', rust, re.MULTILINE)
    assert python_version and rust_version  # noqa: PT018 - both are needed to go on
    assert python_version[1] == rust_version[1]


def test_the_binding_is_built_optimised_in_editable_installs_too() -> None:
    extension = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert re.search(r"^ +debug=False,$", extension, re.MULTILINE)
