"""The planted faults: what they are, where they are listed, how one is put into a file.

Each ``*.toml`` beside this module is an area: the tests that are to notice its faults, and the
faults. Imports the standard library only; runs nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Fault", "chosen", "read_faults", "why_stale"]

FAULTS_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Fault:
    """A fault as a developer could make it.

    Attributes:
        area: The file that lists it, without its ending.
        name: What is wrong, in words.
        breaks: The promise that no longer holds.
        file: Path of the file, from the root of the project.
        before: Text that is in the file once.
        after: What stands there instead.
        pytest: The tests that are to notice it: files or folders, in which * stands for anything.
        cargo: Or arguments of ``cargo test``.
    """

    area: str
    name: str
    breaks: str
    file: str
    before: str
    after: str
    pytest: tuple[str, ...] = ()
    cargo: tuple[str, ...] = ()


def read_faults(folder: Path = FAULTS_FOLDER) -> list[Fault]:
    """Return all faults that are listed.

    Raises:
        ValueError: Two have one name, one changes nothing, or one has no tests.
    """
    faults = [fault for path in sorted(folder.glob("*.toml")) for fault in _read_area(path)]
    names = set()
    for fault in faults:
        where = f"{fault.area}.toml: {fault.name!r}"
        if fault.name in names:
            raise ValueError(f"{where} is there twice")
        if fault.before == fault.after or not fault.before:
            raise ValueError(f"{where} changes nothing")
        if bool(fault.pytest) == bool(fault.cargo):
            raise ValueError(f"{where} needs tests of pytest or of cargo")
        names.add(fault.name)
    return faults


def _read_area(path: Path) -> Iterable[Fault]:
    document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    tests = {kind: document.get(kind, []) for kind in ("pytest", "cargo")}
    for entry in document["fault"]:
        fields = {**tests, **entry}
        fields["pytest"], fields["cargo"] = tuple(fields["pytest"]), tuple(fields["cargo"])
        yield Fault(area=path.stem, **fields)


def chosen(faults: Sequence[Fault], words: str, share: float, seed: str) -> list[Fault]:
    """Return the faults whose area, name or file has these words, or a share of them by a seed."""
    found = [
        fault
        for fault in faults
        if words.lower() in f"{fault.area}: {fault.name} {fault.file}".lower()
    ]
    if share >= 1 or not found:
        return found
    drawn = random.Random(seed).sample(range(len(found)), max(1, round(len(found) * share)))
    return [found[number] for number in sorted(drawn)]


def why_stale(fault: Fault, root: Path) -> str:
    """Return why a fault cannot be planted in a project, for the code has moved on; else empty."""
    try:
        count = (root / fault.file).read_text(encoding="utf-8").count(fault.before)
    except FileNotFoundError:
        return f"there is no {fault.file}"
    return "" if count == 1 else f"{count} times in {fault.file}: {fault.before.strip()[:80]!r}"
