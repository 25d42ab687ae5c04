"""What setup.cfg asks for fits what is committed."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.gates

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "src" / "backstay" / "_proto"

Version = tuple[int, ...]


def version(text: str) -> Version:
    return tuple(int(part) for part in text.split("."))


def requirements(section: str, key: str) -> dict[str, str]:
    """The requirement lines of setup.cfg: ``{"numpy": ">=1.24", ...}``."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = [line for line in config[section][key].splitlines() if line.strip()]
    matches = [re.match(r"([\w-]+)(?:\[[\w,]+\])?(.*)", line) for line in lines]
    return {match[1]: match[2] for match in matches if match}


def lower_bound(specifier: str) -> Version:
    match = re.search(r">=([\d.]+)", specifier)
    assert match, f"{specifier!r} has no lower bound"
    return version(match[1])


def versions_in_generated_code(pattern: str) -> set[Version]:
    texts = [path.read_text(encoding="utf-8") for path in GENERATED.rglob("*.py")]
    return {version(found) for text in texts for found in re.findall(pattern, text)}


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
    groups = [requirements("options", "install_requires")]
    groups += [
        requirements("options.extras_require", extra)
        for extra in ("s3", "parquet", "paddle", "torch", "dev", "bench")
    ]
    for group in groups:
        for package, specifier in group.items():
            assert re.match(r"[=>]=\d", specifier), f"{package}{specifier}"


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
