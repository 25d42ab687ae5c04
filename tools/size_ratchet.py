"""Refuse functions that have grown past what one can read in one go.

A function holds at most 70 lines, in Python and in Rust. A file has no limit: files are split by
what makes them change. What is over the limit and tolerated stands in
``tools/size_tolerated.txt`` with its size; such a giant may shrink (its entry must then follow)
but never grow. Generated code is not measured.

Python functions are found with ``ast``. Rust functions are found by matching braces after
blanking out comments, strings and character literals: a lexer of some 20 lines instead of a parser.

Usage: ``python tools/size_ratchet.py [ROOT]``. Imports the standard library only.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FUNCTION_LINES_MAX = 70
TOLERATED = "tools/size_tolerated.txt"
SKIPPED_FOLDERS = {"target", "build", "dist", "site", "_proto", "node_modules", "__pycache__"}

# In order: nested block comments are rare enough to be treated as flat ones.
_RUST_OPAQUE = re.compile(
    r"""
    //[^\n]*                                # line comment
    | /\*.*?\*/                             # block comment
    | \bb?r(?P<hash>\#*)".*?"(?P=hash)      # raw string
    | b?"(?:\\.|[^"\\])*"                   # string
    | b?'(?:\\(?:x[0-9a-fA-F]{2}|u\{[0-9a-fA-F_]+\}|.)|[^'\\\n])'   # character, not a lifetime
    """,
    re.VERBOSE | re.DOTALL,
)
_RUST_FUNCTION = re.compile(r"\bfn\s+(?P<name>[A-Za-z_]\w*)\s*[<(]")


class Size(NamedTuple):
    """One measured function: ``name`` is ``path::function``."""

    name: str
    lines: int
    limit: int


def python_functions(source: str) -> Iterator[tuple[str, int]]:
    """Yield ``(qualified name, lines)`` of each function, decorators left out."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                last = child.end_lineno or child.lineno
                yield prefix + child.name, last - child.lineno + 1
            named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            yield from walk(child, f"{prefix}{child.name}." if named else prefix)  # type: ignore[attr-defined]

    return walk(ast.parse(source), "")


def rust_functions(source: str) -> Iterator[tuple[str, int]]:
    """Yield ``(name, lines)`` of each function that has a body."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    text = _RUST_OPAQUE.sub(blank, source)
    for match in _RUST_FUNCTION.finditer(text):
        end = _rust_body_end(text, match.end())
        if end is not None:
            yield match["name"], text.count("\n", match.start(), end) + 1


def _rust_body_end(text: str, start: int) -> int | None:
    """Index of the brace that closes the body, or None for a declaration without one."""
    brackets = 1 if text[start - 1] == "(" else 0
    braces = 0
    for index in range(start, len(text)):
        char = text[index]
        if char in "([":
            brackets += 1
        elif char in ")]":
            brackets -= 1
        elif char == ";" and brackets == 0 and braces == 0:
            return None  # a trait's required method; "[u8; 4]" is inside brackets
        elif char == "{":
            braces += 1
        elif char == "}":
            braces -= 1
            if braces == 0 and brackets == 0:
                return index
    return None


def measure(root: Path) -> Iterator[Size]:
    """Yield the size of every function in the source files below ``root``."""
    for folder, folders, files in os.walk(root):  # links are not followed: each file once
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and f[0] != ".")
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix not in {".py", ".pyi", ".rs"}:
                continue
            source = path.read_text(encoding="utf-8")
            name = path.relative_to(root).as_posix()
            functions = rust_functions if path.suffix == ".rs" else python_functions
            for function, lines in functions(source):
                yield Size(f"{name}::{function}", lines, FUNCTION_LINES_MAX)


def read_tolerated(path: Path) -> dict[str, int]:
    """Read ``name lines`` entries; ``#`` begins a comment."""
    entries = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = line.partition("#")[0].split()
            if entry:
                name, lines = entry
                entries[name] = int(lines)
    return entries


def problems(sizes: list[Size], tolerated: dict[str, int]) -> Iterator[str]:
    """Yield one sentence for each thing that is over its limit, and each stale entry."""
    over: dict[str, int] = {}
    for size in sizes:
        if size.lines > size.limit:
            over[size.name] = max(size.lines, over.get(size.name, 0))
            if size.lines > tolerated.get(size.name, 0):
                allowed = tolerated.get(size.name, size.limit)
                yield f"{size.name}: {size.lines} lines, at most {allowed} allowed; split it"
    for name, lines in tolerated.items():
        if over.get(name, 0) < lines:
            now = over.get(name)
            advice = f"lower it to {now}" if now else "delete it"
            yield f"{TOLERATED}: the entry of {name} ({lines}) is too high; {advice}"


def main() -> int:
    """Print what is too long; return 1 if anything is."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    found = list(problems(list(measure(root)), read_tolerated(root / TOLERATED)))
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
