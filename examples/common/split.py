"""Write train, validation and test files of a text file, plain or .gz.

    python examples/common/split.py --by position ratings.tsv.gz FOLDER

The three files are not compressed: a reader of tasks begins in the middle of a file, and a .gz file
would have to be read from its beginning for each task. May import the standard library only.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from itertools import chain
from pathlib import Path

__all__ = ["split"]

NAMES = ("train", "validation", "test")


def split(path: Path, folder: Path, *, by: str, header: bool) -> dict[str, int]:
    """Write ``folder/{train,validation,test}`` with the ending of ``path``.

    Args:
        path: The file.
        folder: Made if it is not there; files in it are replaced.
        by: "position": the first 80 % of the lines, the next 10 %, the last 10 %. "row": lines
            whose number, from 0, ends in 8 are for validation, in 9 for the test.
        header: Whether the first line names columns; each file gets it.

    Returns:
        The number of lines of each, without headers.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It has fewer than ten lines.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as file:
        lines = file.readlines()
    head = [lines.pop(0)] if header and lines else []
    count = len(lines)
    if count < 10:
        raise ValueError(f"{path}: {count} lines are too few to split")
    if by == "position":
        first, second = count * 8 // 10, count * 9 // 10
        parts = [lines[:first], lines[first:second], lines[second:]]
    else:
        parts = [
            [line for number, line in enumerate(lines) if number % 10 < 8],
            lines[8::10],
            lines[9::10],
        ]
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(NAMES, parts, strict=True):
        with open(folder / f"{name}{suffix}", "w", encoding="utf-8", newline="") as file:
            file.writelines(chain(head, part))
    return {name: len(part) for name, part in zip(NAMES, parts, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write train, validation and test files.")
    parser.add_argument("path", type=Path, help="text file, one record a line; may end in .gz")
    parser.add_argument("folder", type=Path, help="where the three files go")
    parser.add_argument("--by", choices=["position", "row"], required=True)
    parser.add_argument("--no-header", action="store_true", help="the first line is a record")
    arguments = parser.parse_args()
    try:
        counts = split(
            arguments.path, arguments.folder, by=arguments.by, header=not arguments.no_header
        )
    except (OSError, EOFError, ValueError) as error:
        sys.exit(f"{arguments.path} cannot be split: {error}")
    print(f"{arguments.folder}: " + ", ".join(f"{n:,} {name}" for name, n in counts.items()))


if __name__ == "__main__":
    main()
