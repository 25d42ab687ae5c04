"""Each gate of `make lint` passes on a clean tree and names a fault that is planted in it.

A tree is the smallest that the gate needs, with the repository's own settings copied into it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gates

ROOT = Path(__file__).resolve().parents[2]
# Scripts of the environment that runs the tests, on the PATH or not.
SCRIPTS = Path(sys.executable).parent

Files = dict[str, str]
GUARD = 'if __name__ != "backstay.{0}":\n    raise ImportError("import backstay.{0}")\n'

FOLDERS = ("consensus", "master", "pserver", "trainer")
KUBERNETES_MODULES = (
    *("job_events", "names", "objects", "pod_exit", "pod_memory", "pod_template"),
    *("pserver_objects", "refusals", "spec", "worker_pods"),
)
# What the contracts of import-linter name must be there.
ROOMS = (
    "src/backstay/_proto/__init__.py",
    "src/backstay/rpc.py",
    "src/backstay/data/__init__.py",
    "src/backstay/job/__init__.py",
    "src/backstay/job/calls.py",
    "src/backstay/schedule/__init__.py",
    "src/backstay/job_engine/__init__.py",
    "src/backstay/job_engine/events/__init__.py",
    *(f"src/backstay/job_engine/events/{module}.py" for module in ("tasks", "workers")),
    "src/backstay/job_engine/scaling.py",
    "src/backstay/runner/__init__.py",
    "src/backstay/cli/__init__.py",
    "src/backstay/cli/run.py",
    "src/backstay/job_spec.py",
    "src/backstay/jobs_api.py",
    "master/job.py",
    "src/backstay/kubernetes/__init__.py",
    *(f"src/backstay/kubernetes/{module}.py" for module in KUBERNETES_MODULES),
    *(f"trainer/worker/{module}.py" for module in ("local_run", "master_link")),
    *(f"trainer/{room}/__init__.py" for room in ("adapter", "modes", "paddle", "torch", "worker")),
)
CLEAN_PYTHON: Files = {
    "src/backstay/__init__.py": '"""Root."""\n',
    "src/backstay/errors.py": '"""Errors."""\n',
    "src/backstay/_version.py": '"""Version."""\n',
    **{
        f"{folder}/__init__.py": f'"""{folder}."""\n\n' + GUARD.format(folder) for folder in FOLDERS
    },
    **dict.fromkeys(ROOMS, '"""Room."""\n'),
    "pserver/store.py": '"""Store."""\n\nimport time\n\nSTARTED = time.time()\n',
    "consensus/slots.py": '"""Slots."""\n\nimport backstay.errors\n\nOF = backstay.errors\n',
}


def plant(root: Path, files: Files) -> Path:
    """Write the files, the links of src/backstay/ and the settings of the tools."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "pyproject.toml", root)
    for folder in FOLDERS:
        if (root / folder).is_dir():
            (root / "src" / "backstay" / folder).symlink_to(f"../../{folder}")
    return root


def run(root: Path, *command: str, **environment: str) -> tuple[int, str]:
    """Run the command in the tree and return its exit status and all it printed."""
    done = subprocess.run(
        command,
        cwd=root,
        env=os.environ | {"NO_COLOR": "1", "CARGO_TERM_COLOR": "never"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def ruff(root: Path) -> tuple[int, str]:
    return run(root, str(SCRIPTS / "ruff"), "check", "--no-cache", ".")


def mypy(root: Path) -> tuple[int, str]:
    return run(root, str(SCRIPTS / "mypy"), "src")


def layers(root: Path) -> tuple[int, str]:
    return run(root, str(SCRIPTS / "lint-imports"), "--no-cache", PYTHONPATH=str(root / "src"))


@pytest.mark.parametrize("gate", [ruff, mypy, layers])
def test_a_clean_tree_passes(tmp_path: Path, gate: object) -> None:
    assert callable(gate)
    status, output = gate(plant(tmp_path, CLEAN_PYTHON))
    assert status == 0, output


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("import time\n\nNOW = time.time()\n", "`time.time` is banned"),
        ("from time import monotonic\n\nNOW = monotonic()\n", "`time.monotonic` is banned"),
        ("import time\n\ntime.sleep(1)\n", "`time.sleep` is banned"),
        ("import random\n\nDRAW = random.random()\n", "`random` is banned"),
        ("import numpy as np\n\nDRAW = np.random.default_rng()\n", "`numpy.random` is banned"),
        ("import datetime\n\nNOW = datetime.datetime.now()\n", "`datetime.datetime.now` is banned"),
        ("import uuid\n\nID = uuid.uuid4()\n", "`uuid.uuid4` is banned"),
    ],
)
def test_ruff_refuses_clocks_and_randomness_in_consensus_only(
    tmp_path: Path, body: str, named: str
) -> None:
    text = f'"""Module."""\n\n{body}'
    fault = plant(tmp_path / "fault", CLEAN_PYTHON | {"consensus/impure.py": text})
    status, output = ruff(fault)
    assert status != 0
    assert named in output
    assert "consensus/impure.py" in output
    elsewhere = plant(tmp_path / "elsewhere", CLEAN_PYTHON | {"pserver/impure.py": text})
    assert ruff(elsewhere)[0] == 0


def test_ruff_refuses_clocks_wherever_something_is_decided(tmp_path: Path) -> None:
    folders = ("pserver/controller", "src/backstay/job_engine", "src/backstay/schedule")
    text = '"""Module."""\n\nimport time\n\nNOW = time.time()\n'
    impure = {f"{folder}/impure.py": text for folder in folders}
    status, output = ruff(plant(tmp_path, CLEAN_PYTHON | impure))
    assert status != 0
    for file in impure:
        assert file in output


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("try:\n    print\nexcept Exception:\n    pass\n", "BLE001"),
        ("# TODO: later\n", "FIX002"),
        ("def undocumented():\n    return 1\n", "D103"),
        ("from . import store\n\nSTORE = store\n", "TID252"),
        ("print('debugging')\n", "T201"),
        ('def long():\n    """Do."""\n' + "    print\n" * 51, "PLR0915"),
        ('def wide(a):\n    """Do."""\n' + "    if a:\n        print\n" * 20, "C901"),
    ],
)
def test_ruff_refuses_what_the_house_rules_refuse(tmp_path: Path, body: str, code: str) -> None:
    files = CLEAN_PYTHON | {"pserver/fault.py": f'"""Module."""\n\n{body}'}
    status, output = ruff(plant(tmp_path, files))
    assert status != 0
    assert code in output


def test_ruff_format_refuses_another_style(tmp_path: Path) -> None:
    root = plant(tmp_path, CLEAN_PYTHON | {"pserver/fault.py": "x = {'a':1}\n"})
    status, output = run(root, str(SCRIPTS / "ruff"), "format", "--no-cache", "--check", ".")
    assert status != 0
    assert "fault.py" in output


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("def untyped(x):\n    return x\n", "no-untyped-def"),
        ("def loose(x: dict) -> None: ...\n", "type-arg"),
        ("def wrong() -> int:\n    return ''\n", "return-value"),
        ("X: int = 1  # type: ignore\n", "unused-ignore"),
    ],
)
def test_mypy_is_strict(tmp_path: Path, body: str, code: str) -> None:
    status, output = mypy(plant(tmp_path, CLEAN_PYTHON | {"trainer/fault.py": body}))
    assert status != 0
    assert f"[{code}]" in output
    assert "fault.py" in output


@pytest.mark.parametrize(
    ("file", "imported", "broken"),
    [
        ("trainer/fault.py", "backstay.pserver.store", "backstay.trainer.fault -> "),
        ("consensus/fault.py", "backstay.pserver.store", "backstay.consensus.fault -> "),
        ("consensus/fault.py", "backstay.trainer", "backstay.consensus.fault -> "),
        ("src/backstay/errors.py", "backstay.consensus.slots", "backstay.errors -> "),
        ("trainer/fault.py", "paddle", "backstay.trainer.fault -> paddle"),
        ("pserver/fault.py", "torch", "backstay.pserver.fault -> torch"),
        ("src/backstay/homeless.py", "math", "homeless"),
        ("trainer/eager.py", "backstay.master", "backstay.trainer.eager -> backstay.master"),
        ("master/eager.py", "backstay.trainer", "backstay.master.eager -> backstay.trainer"),
        ("src/backstay/job/fault.py", "backstay.master", "backstay.job.fault -> "),
        ("master/server.py", "backstay.pserver", "backstay.master.server -> backstay.pserver"),
        ("trainer/homeless.py", "math", "homeless"),
        ("src/backstay/data/fault.py", "backstay.rpc", "data.fault -> backstay.rpc"),
        ("src/backstay/data/fault.py", "socket", "data.fault -> socket"),
        ("src/backstay/data/fault.py", "backstay.trainer.worker", "data.fault -> "),
        ("trainer/adapter/fault.py", "backstay.trainer.torch", "adapter.fault -> "),
        ("trainer/paddle/fault.py", "backstay.trainer.torch", "paddle.fault -> "),
        ("trainer/modes/fault.py", "backstay.trainer.worker", "modes.fault -> "),
        ("trainer/worker/local_run.py", "backstay.trainer.worker.master_link", "local_run -> "),
        (
            "src/backstay/job_engine/fault.py",
            "backstay.master.job",
            "job_engine.fault -> backstay.master.job",
        ),
        ("src/backstay/job_engine/fault.py", "grpc", "job_engine.fault -> grpc"),
        (
            "src/backstay/job_engine/events/tasks.py",
            "backstay.job_engine.events.workers",
            "events.tasks -> backstay.job_engine.events.workers",
        ),
        ("src/backstay/job_engine/fault.py", "threading", "job_engine.fault -> threading"),
        ("src/backstay/schedule/fault.py", "time", "schedule.fault -> time"),
        ("src/backstay/schedule/fault.py", "backstay.master", "schedule.fault -> backstay.master"),
        ("src/backstay/kubernetes/objects.py", "time", "kubernetes.objects -> time"),
        ("src/backstay/kubernetes/worker_pods.py", "kubernetes", "worker_pods -> kubernetes"),
        ("src/backstay/kubernetes/fault.py", "kubernetes", "fault -> kubernetes"),
        ("src/backstay/kubernetes/spec.py", "backstay.runner", "kubernetes.spec -> "),
        ("src/backstay/cli/fault.py", "backstay.kubernetes", "fault -> backstay.kubernetes"),
        ("src/backstay/jobs_api.py", "backstay.cli.run", "jobs_api -> backstay.cli"),
        ("src/backstay/jobs_api.py", "backstay.kubernetes", "jobs_api -> backstay.kubernetes"),
        ("src/backstay/runner/fault.py", "backstay.kubernetes", "fault -> backstay.kubernetes"),
        ("src/backstay/runner/fault.py", "click", "runner.fault -> click"),
        ("src/backstay/jobs_api.py", "rich", "jobs_api -> rich"),
    ],
)
def test_import_linter_holds_the_layers(
    tmp_path: Path, file: str, imported: str, broken: str
) -> None:
    text = f'"""Module."""\n\nimport {imported}\n'
    status, output = layers(plant(tmp_path, CLEAN_PYTHON | {file: text}))
    assert status != 0
    assert broken in output


def test_stubtest_names_a_stub_that_differs_from_the_module(tmp_path: Path) -> None:
    stub = (ROOT / "src" / "backstay" / "_native.pyi").read_text(encoding="utf-8")
    package = tmp_path / "backstay"
    package.mkdir()
    (package / "__init__.pyi").touch()
    (tmp_path / "mypy.ini").write_text("[mypy]\n")

    renamed = stub.replace("def table_id(name: str)", "def table_id(title: str)")
    assert renamed != stub
    faulty = renamed + "\ndef imagined() -> None: ...\n"
    (package / "_native.pyi").write_text(faulty, encoding="utf-8")
    # Both in one run, which reads all of numpy's types. It finds nothing else: the stub is right.
    command = (sys.executable, "-m", "mypy.stubtest", "backstay._native")
    status, output = run(
        tmp_path, *command, "--mypy-config-file", "mypy.ini", MYPYPATH=str(tmp_path)
    )
    assert status != 0
    assert "backstay._native.table_id" in output
    assert "backstay._native.imagined" in output
    assert "Found 2 errors" in output


CLEAN_RUST = """//! A crate that lives under the core's rules.

/// Adds one.
pub fn next(term: u64) -> u64 {
    term + 1
}
"""


def plant_core_crate(root: Path, source: str) -> Path:
    """A workspace with the real lints and one tiny crate under the core's real clippy.toml."""
    workspace = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    workspace = re.sub(
        r"^members = \[.*?\]", 'members = ["crates/core"]', workspace, flags=re.M | re.S
    )
    crate = root / "crates" / "core"
    (crate / "src").mkdir(parents=True)
    (root / "Cargo.toml").write_text(workspace, encoding="utf-8")
    (crate / "Cargo.toml").write_text(
        '[package]\nname = "core-under-test"\nversion = "0.0.0"\nedition = "2021"\n'
        "[lints]\nworkspace = true\n",
        encoding="utf-8",
    )
    shutil.copy(ROOT / "clippy.toml", root)
    shutil.copy(ROOT / "crates" / "backstay-core" / "clippy.toml", crate)
    (crate / "src" / "lib.rs").write_text(source, encoding="utf-8")
    return root


def clippy(root: Path) -> tuple[int, str]:
    command = ("cargo", "clippy", "--offline", "--workspace", "--all-targets")
    return run(root, *command, "--", "-D", "warnings", CARGO_TARGET_DIR=str(root / "target"))


def test_clippy_passes_a_clean_core(tmp_path: Path) -> None:
    status, output = clippy(plant_core_crate(tmp_path, CLEAN_RUST))
    assert status == 0, output


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("std::time::Instant::now().elapsed().as_secs()", "std::time::Instant::now"),
        ("std::time::SystemTime::now().elapsed().map_or(0, |d| d.as_secs())", "SystemTime::now"),
        ("std::collections::HashMap::<u64, u64>::new().len() as u64", "HashMap"),
        ("std::thread::spawn(|| 1).join().unwrap_or(0)", "std::thread::spawn"),
        ('u64::from(std::fs::File::open("x").is_ok())', "std::fs::File"),
        ('"1".parse().unwrap()', "unwrap"),
        ("let mut x = next(0);\n    " + "x = next(x);\n    " * 70 + "x", "too_many_lines"),
    ],
)
def test_clippy_refuses_what_the_core_must_not_do(tmp_path: Path, body: str, named: str) -> None:
    fault = f"{CLEAN_RUST}\n/// Breaks a rule.\npub fn fault() -> u64 {{\n    {body}\n}}\n"
    status, output = clippy(plant_core_crate(tmp_path, fault))
    assert status != 0
    assert named in output
    assert "crates/core/src/lib.rs" in output


def test_rustfmt_refuses_another_style(tmp_path: Path) -> None:
    root = plant_core_crate(tmp_path, CLEAN_RUST)
    check = ("cargo", "fmt", "--all", "--check")
    status, output = run(root, *check)
    assert status == 0, output
    (root / "crates" / "core" / "src" / "lib.rs").write_text("pub fn f( ) { }\n")
    assert run(root, *check)[0] != 0


def test_generated_code_that_was_edited_is_named(tmp_path: Path) -> None:
    for folder in ("proto", "tools", "src/backstay/_proto"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    check = (sys.executable, "tools/generate_proto.py", "--check")
    status, output = run(tmp_path, *check)
    assert status == 0, output
    edited = next((tmp_path / "src").rglob("*_pb2.py"))
    edited.write_text(edited.read_text(encoding="utf-8") + "# edited\n", encoding="utf-8")
    status, output = run(tmp_path, *check)
    assert status == 1
    assert edited.name in output


def test_documentation_with_a_broken_link_is_refused(tmp_path: Path) -> None:
    for name in ("docs", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "index.md").open("a", encoding="utf-8") as index:
        index.write("\n[nowhere](nowhere.md)\n")
    command = (str(SCRIPTS / "mkdocs"), "build", "--strict")
    status, output = run(tmp_path, *command, NO_MKDOCS_2_WARNING="1")
    assert status != 0
    assert "nowhere.md" in output


def test_make_lint_runs_every_gate() -> None:
    status, output = run(ROOT, "make", "--dry-run", "lint")
    assert status == 0, output
    for gate in (
        "ruff check .",
        "ruff format --check .",
        "bin/mypy",
        "lint-imports",
        "tools/generate_proto.py --check",
        "mypy.stubtest backstay._native",
        "cargo fmt --all --check",
        "cargo clippy --workspace --all-targets -- -D warnings",
    ):
        assert gate in output, f"make lint does not run {gate}"


def test_continuous_integration_runs_what_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ("make test", "make demo"):
        assert command in readme
        assert command in script
    assert "make lint" in script
    assert "make docs" in script


def test_make_help_lists_the_targets() -> None:
    status, output = run(ROOT, "make")
    assert status == 0
    for target in [
        "install",
        "demo",
        "test",
        "lint",
        "fmt",
        "bench",
        "fuzz",
        "docs",
        "proto",
        "wheel",
        "clean",
    ]:
        assert re.search(rf"^  make {target} +\S", output, re.MULTILINE), target
