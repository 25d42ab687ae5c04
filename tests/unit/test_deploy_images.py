"""deploy/Dockerfile without docker: what its stages copy is there, and is enough for the wheel."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from backstay._version import __version__
from tests.kubernetes import backstay_image
from tests.manifests import KUBERNETES

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
FIND_PACKAGES = "from setuptools import find_packages; print(*sorted(find_packages('src')))"


class Stage(NamedTuple):
    name: str
    base: str
    lines: list[tuple[str, str]]
    """Each an instruction and its words; continued lines are one."""

    def all(self, instruction: str) -> list[str]:
        return [rest for word, rest in self.lines if word == instruction]


def stages_of(text: str) -> list[Stage]:
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    stages: list[Stage] = []
    for line in filter(None, (one.strip() for one in text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(name, base, []))
        elif stages:
            stages[-1].lines.append((word, rest.strip()))
        else:
            assert word == "ARG", line
    return stages


STAGES = {stage.name: stage for stage in stages_of(DOCKERFILE.read_text(encoding="utf-8"))}


def copied(stage: Stage) -> list[str]:
    """What a stage copies from the repository."""
    return [
        source
        for words in stage.all("COPY")
        if "--from=" not in words
        for source in words.split()[:-1]
    ]


def settings(section: str) -> dict[str, str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return dict(config[section])


def defaults(stage: Stage) -> dict[str, str]:
    return dict(words.split("=", 1) for words in stage.all("ARG") if "=" in words)


def test_the_stages_are_those_that_the_first_lines_tell() -> None:
    assert list(STAGES) == ["etcd", "wheel", "backstay"]
    told = set(re.findall(r"--target (\w+)", DOCKERFILE.read_text(encoding="utf-8")))
    assert told == {"etcd"}
    for stage in STAGES.values():
        for name in re.findall(r"--from=(\w+)", " ".join(stage.all("COPY"))):
            assert list(STAGES).index(name) < list(STAGES).index(stage.name)


def test_each_source_is_tracked_and_reaches_the_build() -> None:
    sent = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    sources = {source for stage in STAGES.values() for source in copied(stage)}
    assert sources == sent
    done = subprocess.run(["git", "ls-files", *sources], cwd=ROOT, capture_output=True, text=True)
    tracked = {line.split("/")[0] for line in done.stdout.splitlines()}
    assert tracked == sources


@pytest.mark.slow
def test_the_wheel_stage_has_all_that_the_wheel_is_made_of(tmp_path: Path) -> None:
    files = subprocess.run(
        ["git", "ls-files", *copied(STAGES["wheel"])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in files:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    found = [
        subprocess.run(
            [sys.executable, "-c", FIND_PACKAGES],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for folder in (ROOT, tmp_path)
    ]
    assert found[0] == found[1]
    assert "backstay.pserver.controller" in found[1].split()
    # Cargo reads each manifest of the workspace, and the lock file must fit them.
    done = subprocess.run(
        ["cargo", "metadata", "--no-deps", "--offline", "--locked", "--format-version", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "backstay-py" in {one["name"] for one in json.loads(done.stdout)["packages"]}
    # What setup.cfg reads besides.
    for name in ("README.md", "LICENSE", "NOTICE"):
        assert (tmp_path / name).is_file()


def test_each_build_argument_that_is_told_is_one_of_the_stage() -> None:
    told = set(re.findall(r"--build-arg (\w+)=", DOCKERFILE.read_text(encoding="utf-8")))
    assert {"FRAMEWORK", "PIP_EXTRA_INDEX_URL"} <= told
    assert told <= {words.split("=")[0] for words in STAGES["backstay"].all("ARG")}


def test_the_build_arguments_are_extras_of_the_package() -> None:
    extras = settings("options.extras_require").keys()
    stage = STAGES["backstay"]
    run = " ".join(stage.all("RUN"))
    frameworks = re.findall(r"(\w+(?:\|\w+)+)\) extras=", run)[0].split("|")
    assert set(frameworks) == {"torch", "paddle"} <= set(extras)
    assert defaults(stage)["FRAMEWORK"] == "none"
    given = set(defaults(stage)["EXTRAS"].split(","))
    # The image of the tests on a cluster runs job masters, and so does this one.
    assert set(backstay_image.EXTRAS) <= given <= set(extras)


def test_the_labels_and_tags_have_the_version_of_the_package() -> None:
    assert defaults(STAGES["backstay"])["VERSION"] == __version__
    tags = re.findall(r"-t backstay[\w-]*:(\S+)", DOCKERFILE.read_text(encoding="utf-8"))
    assert set(tags) == {__version__}


@pytest.mark.parametrize("name", ["etcd", "backstay"])
def test_an_image_runs_as_the_user_of_the_manifests(name: str) -> None:
    assert STAGES[name].all("USER") == ["10001:10001"]
    folder = {"backstay": "base/pserver.yaml", "etcd": "components/etcd/etcd.yaml"}[name]
    text = (KUBERNETES / folder).read_text(encoding="utf-8")
    assert {*re.findall(r"(?:runAsUser|runAsGroup): (\d+)", text)} == {"10001"}


def test_the_image_runs_a_command_of_the_package() -> None:
    (command,) = STAGES["backstay"].all("CMD")
    commands = settings("options.entry_points")["console_scripts"]
    assert re.search(rf"^{json.loads(command)[0]} =", commands, re.MULTILINE)


def test_the_health_check_is_a_program_that_runs_and_asks_only_servers_with_metrics() -> None:
    (words,) = STAGES["backstay"].all("HEALTHCHECK")
    command = json.loads(words.partition("CMD ")[2])
    assert command[0] == "python"
    environment = {"PATH": "/usr/bin:/bin"}
    here = [sys.executable, *command[1:]]
    assert subprocess.run(here, env=environment).returncode == 0
    # Nothing listens on port 1.
    silent = environment | {"BACKSTAY_METRICS": "0.0.0.0:1"}
    assert subprocess.run(here, env=silent, capture_output=True).returncode != 0
