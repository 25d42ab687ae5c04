"""``backstay zoo``: a folder with a model, and the image that carries it to Pods.

The image is built and pushed by docker, podman or buildah. What they print goes to standard error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import click

from backstay._version import __version__
from backstay.cli.zoo_files import zoo_files
from backstay.errors import BackstayError, ConfigError
from backstay.exit_codes import ZOO_CODES, ExitCode
from backstay.exits import examples, exit_on_error, print_json
from backstay.master.job_file import load_job
from backstay.pserver.ctl.asking import json_option
from backstay.settings import check_name

__all__ = ["zoo"]

# In the order in which they are looked for. All three take the same words.
BUILDERS = ("docker", "podman", "buildah")
BUILDER_VARIABLE = "BACKSTAY_BUILDER"
JOB_FILE = "job.yaml"
BUILD_FILE = "Dockerfile"
# Its file descriptor.
STANDARD_ERROR = 2

_folder = click.argument(
    "folder", type=click.Path(file_okay=False, path_type=Path), default=Path(), metavar="[FOLDER]"
)
_image = click.option(
    "--image", metavar="NAME", help="Name of the image. Default: kubernetes.image of job.yaml."
)
_builder = click.option(
    "--builder",
    type=click.Choice(BUILDERS),
    help=f"The program to use. [{BUILDER_VARIABLE}] Default: the first of them that is there.",
)


@click.group(
    epilog=examples(
        ZOO_CODES,
        "backstay zoo init clicks --image REGISTRY/clicks:1",
        "backstay zoo build clicks",
        "backstay zoo push clicks",
    )
)
def zoo() -> None:
    """Begin a folder with a model; make an image of it for jobs on Kubernetes."""


@zoo.command(
    epilog=examples(
        ZOO_CODES,
        "backstay zoo init clicks",
        "backstay zoo init clicks --framework paddle --image REGISTRY/clicks:1",
        f"backstay zoo init clicks --base-image REGISTRY/backstay-torch:{__version__}",
    )
)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--name", metavar="NAME", help="Name of the job. Default: that of the folder.")
@click.option(
    "--framework",
    type=click.Choice(["torch", "paddle"]),
    default="torch",
    show_default=True,
    help="Of the model.",
)
@click.option("--image", metavar="NAME", help="Image of the folder. Default: NAME:1.")
@click.option(
    "--base-image",
    metavar="NAME",
    help=f"Image with backstay and the framework. Default: backstay-FRAMEWORK:{__version__}.",
)
@json_option()
def init(
    folder: Path,
    name: str | None,
    framework: Literal["torch", "paddle"],
    image: str | None,
    base_image: str | None,
    as_json: bool,
) -> None:
    """Write a model, its job file, some data and a Dockerfile to FOLDER.

    `backstay train FOLDER/job.yaml` runs it as it is. If one of these files is there already,
    nothing is written.
    """
    with exit_on_error(ExitCode.FAILED, as_json=as_json):
        job = name or folder.absolute().name
        check_name("--name" if name else "FOLDER: the name of the job", job)
        image = _checked("--image", image or f"{job.lower()}:1")
        base_image = base_image or f"backstay-{framework}:{__version__}"
        base_image = _checked("--base-image", base_image)
        files = zoo_files(job, framework, image=image, base_image=base_image)
        _write(folder, files)
    if as_json:
        print_json({"folder": str(folder), "job": job, "files": sorted(files)})
        return
    click.echo(f"{folder} has {', '.join(sorted(files))}")
    click.echo(f"Try it: backstay train {folder / JOB_FILE} --local")


@zoo.command(
    epilog=examples(
        ZOO_CODES,
        "backstay zoo build clicks",
        "backstay zoo build clicks --image REGISTRY/clicks:2 --builder podman",
        "backstay zoo build clicks --build-arg PIP_EXTRA_INDEX_URL=URL",
    )
)
@_folder
@_image
@_builder
@click.option(
    "--build-arg",
    "build_args",
    multiple=True,
    metavar="NAME=VALUE",
    help="A value for an ARG of the Dockerfile; more than once for several.",
)
@json_option()
def build(
    folder: Path,
    image: str | None,
    builder: str | None,
    build_args: tuple[str, ...],
    as_json: bool,
) -> None:
    """Build the image of FOLDER, by default the current one, from its Dockerfile."""
    with exit_on_error(ExitCode.FAILED, as_json=as_json):
        if not (folder / BUILD_FILE).is_file():
            raise ConfigError(
                f"{folder} has no {BUILD_FILE}; `backstay zoo init FOLDER` writes one to a new "
                "folder"
            )
        named, program = _image_of(folder, image), _builder_of(builder, os.environ)
        given = [f"--build-arg={one}" for one in build_args]
        _run([program, "build", *given, f"--tag={named}", str(folder)])
    _tell("built", named, program, as_json=as_json)


@zoo.command(
    epilog=examples(
        ZOO_CODES,
        "backstay zoo push clicks",
        "backstay zoo push --image REGISTRY/clicks:2 --builder buildah",
    )
)
@_folder
@_image
@_builder
@json_option()
def push(folder: Path, image: str | None, builder: str | None, as_json: bool) -> None:
    """Push the image of FOLDER, by default the current one, to the registry that its name says.

    The program that pushes is the one that logs in: for instance `docker login REGISTRY`.
    """
    with exit_on_error(ExitCode.FAILED, as_json=as_json):
        named, program = _image_of(folder, image), _builder_of(builder, os.environ)
        _run([program, "push", named])
    _tell("pushed", named, program, as_json=as_json)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write all files, or none if one of them is there.

    Raises:
        ConfigError: One is there.
        BackstayError: One cannot be written.
    """
    there = [path for path in sorted(files) if (folder / path).exists()]
    if there:
        raise ConfigError(
            f"{folder} has {', '.join(there)} already; name a new folder, or move them away"
        )
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise BackstayError(f"{folder} cannot be written: {error}") from error


def _image_of(folder: Path, given: str | None) -> str:
    """Return the name of the image: the argument, or that of the job file.

    Raises:
        ConfigError: Neither is there, or it is no name.
    """
    if given is not None:
        return _checked("--image", given)
    path = folder / JOB_FILE
    if not path.is_file():
        raise ConfigError(f"{path} is not there, so nothing names the image; give --image NAME")
    spec = load_job(path, {}, folder=Path.cwd())
    if spec.kubernetes is None:
        raise ConfigError(f"{path} names no kubernetes.image; add it there, or give --image NAME")
    return _checked("kubernetes.image", spec.kubernetes.image)


def _checked(where: str, image: str) -> str:
    if not image or image.startswith("-") or any(one.isspace() for one in image):
        raise ConfigError(f"{where}: {image!r} is not the name of an image")
    return image


def _builder_of(given: str | None, environment: Mapping[str, str]) -> str:
    """Return the program that builds: argument over environment over the first that is there.

    Raises:
        ConfigError: It is none of the three, or it is not there.
    """
    named = given or environment.get(BUILDER_VARIABLE)
    there = [one for one in BUILDERS if shutil.which(one)]
    if not named:
        if not there:
            raise ConfigError(
                f"none of {', '.join(BUILDERS)} is on PATH: install one of them to build and push "
                "images"
            )
        return there[0]
    source = "--builder" if given else BUILDER_VARIABLE
    if named not in BUILDERS:
        raise ConfigError(f"{source}: {named!r} is none of {', '.join(BUILDERS)}")
    if named not in there:
        found = f"; there is {', '.join(there)}" if there else ""
        raise ConfigError(f"{source}: {named} is not on PATH{found}")
    return named


def _run(command: Sequence[str]) -> None:
    """Run the builder to its end, however long it takes; Ctrl-C ends both.

    Raises:
        BackstayError: It cannot be run, or says that it failed.
    """
    what = f"`{' '.join(command[:2])}`"
    try:
        # Standard output is for the result of this command.
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=STANDARD_ERROR, check=False)
    except OSError as error:
        raise BackstayError(f"{what} cannot be run: {error}") from error
    if done.returncode:
        raise BackstayError(
            f"{what} ended with exit code {done.returncode}; what it printed says why. --builder "
            "names another program"
        )


def _tell(what: str, image: str, builder: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"image": image, "builder": builder})
        return
    click.echo(f"{image} {what} by {builder}")
