"""The size ratchet measures Python and Rust, and only lets giants shrink."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import size_ratchet

pytestmark = pytest.mark.gates

ROOT = Path(__file__).resolve().parents[2]


def python_function(lines: int) -> str:
    return "def giant() -> None:\n" + "    print()\n" * (lines - 1)


def rust_function(lines: int) -> str:
    return "fn giant() {\n" + "    run();\n" * (lines - 2) + "}\n"


def check(root: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "size_ratchet.py"), str(root)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_the_repository_is_within_its_limits() -> None:
    assert check(ROOT) == (0, "")


@pytest.mark.parametrize(
    ("file", "text"), [("a.py", python_function(70)), ("a.rs", rust_function(70))]
)
def test_the_limit_itself_is_allowed(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    assert check(tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("file", "text"), [("a.py", python_function(71)), ("a.rs", rust_function(71))]
)
def test_a_longer_function_is_named(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    status, output = check(tmp_path)
    assert status == 1
    assert f"{file}::giant: 71 lines, at most 70 allowed" in output


def test_a_file_has_no_limit(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("\n" * 5000)
    assert check(tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("tolerated", "problem"),
    [
        ("a.py::giant 80", None),
        ("a.py::giant 79", "a.py::giant: 80 lines, at most 79 allowed"),
        ("a.py::giant 81", "is too high; lower it to 80"),
        ("a.py::giant 80\nb.py::f 600", "the entry of b.py::f (600) is too high; delete it"),
    ],
)
def test_giants_may_shrink_and_never_grow(
    tmp_path: Path, tolerated: str, problem: str | None
) -> None:
    (tmp_path / "a.py").write_text(python_function(80))
    (tmp_path / "tools").mkdir()
    (tmp_path / size_ratchet.TOLERATED).write_text(f"# why\n{tolerated}\n")
    status, output = check(tmp_path)
    if problem is None:
        assert (status, output) == (0, "")
    else:
        assert status == 1
        assert problem in output


def test_generated_code_and_links_are_not_measured(tmp_path: Path) -> None:
    for folder in ("src/_proto", "target", ".venv"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(python_function(71))
    (tmp_path / "link").symlink_to(tmp_path / "src" / "_proto")
    assert check(tmp_path) == (0, "")


def test_rust_text_that_looks_like_braces_is_not_counted() -> None:
    source = r"""
/* } fn not_me() { */
trait T { fn declared(&self, a: [u8; 4]) -> u8; }
fn a<'x>(s: &'x str) -> char {
    let _ = "} fn quoted() {"; // }
    let _ = r#"}"}"#;
    let _ = (b'{', '\'', '}', "\"}", b"}");
    if s.is_empty() { '{' } else { '\u{7d}' }
}
impl<T> X for Y<T> where T: Fn(u8) -> u8 {
    fn b() -> [u8; 2] { [0; 2] }
}
"""
    assert list(size_ratchet.rust_functions(source)) == [("a", 6), ("b", 1)]


def test_nested_python_functions_have_qualified_names() -> None:
    source = "class C:\n    async def f(self):\n        if 1:\n            def g(): ...\n"
    assert list(size_ratchet.python_functions(source)) == [("C.f", 3), ("C.f.g", 1)]
