"""``backstay zoo`` without an image: which files, which program, which arguments."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from backstay._version import __version__
from backstay.cli import main
from backstay.cli.zoo import BUILDER_VARIABLE, BUILDERS
from backstay.cli.zoo_files import IMAGE_FOLDER, USER, zoo_files
from backstay.kubernetes.pod_template import section
from backstay.master.job_file import load_job
from tests.kubernetes.backstay_image import USER_ID

FILES = {
    ".dockerignore",
    "Dockerfile",
    "data/test.csv",
    "data/train.csv",
    "job.yaml",
    "model.py",
    "requirements.txt",
}
# Writes its name and arguments, and says something as a builder does.
PROGRAM = """\
#!{python}
import json, os, sys
with open({said!r}, "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file)
print("Step 1/6")
sys.exit({code})
"""


class Programs:
    """The programs on PATH, and with what arguments they were called."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said = folder / "said"

    def add(self, name: str, code: int = 0) -> None:
        path = self._folder / name
        words = {"python": sys.executable, "said": str(self._said), "code": code}
        path.write_text(PROGRAM.format_map(words), encoding="utf-8")
        path.chmod(0o755)

    def calls(self) -> list[list[str]]:
        if not self._said.exists():
            return []
        return [json.loads(line) for line in self._said.read_text().splitlines()]

    def zoo(self, *words: str, builder: str = "") -> Result:
        env = {"PATH": str(self._folder), BUILDER_VARIABLE: builder}
        return CliRunner().invoke(main, ["zoo", *words], env=env)


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    folder = tmp_path / "bin"
    folder.mkdir()
    return Programs(folder)


def init(*words: str) -> Result:
    return CliRunner().invoke(main, ["zoo", "init", *words])


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    folder = tmp_path / "clicks"
    assert init(str(folder), "--image", "registry/clicks:1").exit_code == 0
    return folder


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_init_writes_a_job_that_loads(clicks: Path) -> None:
    assert written(clicks) == FILES
    spec = load_job(clicks / "job.yaml", {}, folder=clicks)
    assert (spec.name, spec.framework) == ("clicks", "torch")
    assert Path(spec.model) == clicks / "model.py"
    for data in spec.data.values():
        assert all(Path(path).is_file() for path in data.paths)
    assert section(spec).image == "registry/clicks:1"


@pytest.mark.parametrize("name", ["1", "null", "a.b_C-d"])
def test_any_name_of_a_job_is_one_in_the_file(name: str, tmp_path: Path) -> None:
    assert init(str(tmp_path / "x"), "--name", name).exit_code == 0
    spec = load_job(tmp_path / "x" / "job.yaml", {}, folder=tmp_path)
    assert spec.name == name
    assert section(spec).image == f"{name.lower()}:1"


def test_init_tells_what_it_wrote_as_json(tmp_path: Path) -> None:
    done = init(str(tmp_path / "clicks"), "--json")
    told = json.loads(done.stdout)
    assert told["job"] == "clicks"
    assert set(told["files"]) == written(tmp_path / "clicks")


def test_init_changes_nothing_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("mine")
    done = init(str(tmp_path), "--name", "clicks")
    assert done.exit_code == 2
    assert f"{tmp_path} has model.py already; name a new folder" in done.stderr
    assert written(tmp_path) == {"model.py"}


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = init(str(tmp_path / "file" / "clicks"))
    assert done.exit_code == 1
    assert "clicks cannot be written: " in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("my models",), "FOLDER: the name of the job: 'my models' is not a name of 1 to 64"),
        (("x", "--name", "a b"), "--name: 'a b' is not a name of 1 to 64"),
        (("x", "--image", "a b"), "--image: 'a b' is not the name of an image"),
        (("x", "--base-image", "-v"), "--base-image: '-v' is not the name of an image"),
    ],
)
def test_names_that_cannot_be_are_refused(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = init(*words)
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert message in done.stderr


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_the_model_file_is_of_its_framework_only(framework: str) -> None:
    assert framework in ("torch", "paddle")
    files = zoo_files("x", framework, image="x:1", base_image="base")  # type: ignore[arg-type]
    tree = ast.parse(files["model.py"])
    imported = {one.names[0].name for one in ast.walk(tree) if isinstance(one, ast.Import)}
    assert imported == {"numpy", framework}


def test_the_image_ends_as_the_user_of_the_base_image(clicks: Path) -> None:
    text = (clicks / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^FROM (.+)$", text, re.MULTILINE) == [f"backstay-torch:{__version__}"]
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["0:0", USER]
    assert USER.split(":")[0] == str(USER_ID)
    assert 'ARG PIP_EXTRA_INDEX_URL=""\n' in text


def test_the_pods_of_the_job_find_the_model_in_the_image(clicks: Path) -> None:
    job, data = clicks / "job.yaml", f"{IMAGE_FOLDER}/data"
    words = ["--on", "kubernetes", "--endpoint", "pserver:7000", "--dry-run"]
    words += ["--training", f"{data}/train.csv", "--validation", f"{data}/test.csv"]
    done = CliRunner().invoke(main, ["train", str(job), *words])
    assert done.exit_code == 0, done.stderr
    deployment, *others = yaml.safe_load_all(done.stdout)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry/clicks:1"
    files = {name: text for one in others for name, text in one.get("data", {}).items()}
    assert list(files) == ["job.json"]
    carried = json.loads(files["job.json"])
    assert carried["model"] == f"{IMAGE_FOLDER}/model.py"
    assert f"COPY --chown={USER} . {IMAGE_FOLDER}/" in (clicks / "Dockerfile").read_text()


@pytest.mark.parametrize("builder", BUILDERS)
def test_each_builder_builds_and_pushes_the_image_of_the_job_file(
    builder: str, programs: Programs, clicks: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    programs.add(builder)
    built = programs.zoo("build", str(clicks))
    assert built.stdout == f"registry/clicks:1 built by {builder}\n", built.stderr
    # What the builder says is not part of the result.
    assert capfd.readouterr() == ("", "Step 1/6\n")
    pushed = programs.zoo("push", str(clicks), "--json")
    assert json.loads(pushed.stdout) == {"image": "registry/clicks:1", "builder": builder}
    assert programs.calls() == [
        [builder, "build", "--tag=registry/clicks:1", str(clicks)],
        [builder, "push", "registry/clicks:1"],
    ]


def test_arguments_win_over_the_job_file_and_the_environment(
    programs: Programs, clicks: Path
) -> None:
    for name in BUILDERS:
        programs.add(name)
    assert programs.zoo("push", str(clicks)).exit_code == 0
    assert programs.zoo("push", str(clicks), builder="podman").exit_code == 0
    words = ("--builder", "buildah", "--image", "other:2")
    # An image that is named needs no job file.
    assert programs.zoo("push", *words, builder="podman").exit_code == 0
    given = ("--build-arg", "A=1", "--build-arg", "B=2")
    assert programs.zoo("build", str(clicks), *given, "--image", "other:2").exit_code == 0
    assert programs.calls() == [
        ["docker", "push", "registry/clicks:1"],
        ["podman", "push", "registry/clicks:1"],
        ["buildah", "push", "other:2"],
        ["docker", "build", "--build-arg=A=1", "--build-arg=B=2", "--tag=other:2", str(clicks)],
    ]


def test_a_builder_that_is_not_there_is_told(programs: Programs, clicks: Path) -> None:
    none = programs.zoo("build", str(clicks), "--json")
    assert none.exit_code == 2
    assert "none of docker, podman, buildah is on PATH: install one" in none.stderr
    assert "none of docker" in json.loads(none.stdout)["error"]
    programs.add("podman")
    for words, variable, message in (
        (("--builder", "docker"), "", "--builder: docker is not on PATH; there is podman"),
        ((), "docker", f"{BUILDER_VARIABLE}: docker is not on PATH; there is podman"),
        ((), "kaniko", f"{BUILDER_VARIABLE}: 'kaniko' is none of docker, podman, buildah"),
    ):
        done = programs.zoo("build", str(clicks), *words, builder=variable)
        assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    assert programs.calls() == []


def test_a_builder_that_fails_is_told(programs: Programs, clicks: Path) -> None:
    programs.add("docker", code=7)
    done = programs.zoo("build", str(clicks))
    assert done.exit_code == 1
    assert "Error: `docker build` ended with exit code 7" in done.stderr
    assert done.stdout == ""


def test_what_names_no_image_is_told(programs: Programs, clicks: Path, tmp_path: Path) -> None:
    programs.add("docker")
    empty = tmp_path / "empty"
    empty.mkdir()
    job = clicks / "job.yaml"
    job.write_text(job.read_text().partition("kubernetes:")[0])
    for words, message in (
        (("build", str(empty)), "empty has no Dockerfile; `backstay zoo init FOLDER`"),
        (("push", str(empty)), "job.yaml is not there, so nothing names the image"),
        (("push", str(clicks)), "job.yaml names no kubernetes.image; add it there"),
        (("push", "--image=-rm"), "--image: '-rm' is not the name of an image"),
    ):
        done = programs.zoo(*words)
        assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    assert programs.calls() == []
