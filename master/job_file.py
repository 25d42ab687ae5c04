"""A job file (YAML) and what the command line adds to it, made into a ``JobSpec``.

Errors name the field and, where it stands in the file, the line. Relative paths in a file are
relative to the file's folder, so that a job means the same wherever it is started; ``$NAME`` in a
path is an environment variable.

It imports ``backstay.job_spec``, ``backstay.settings`` and ``backstay.errors``; the one file
it reads is the one it is given, and it runs nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from backstay.errors import ConfigError
from backstay.job_spec import JobSpec
from backstay.settings import nested_kind

__all__ = ["load_job", "parse_value", "to_yaml"]

FILE_BYTES_MAX = 1024 * 1024
# Texts that name something else than a file of this machine.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_DATA_FIELDS = ("training", "validation", "prediction")


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: 1e-3 is a number, a date is a string, no name twice, no aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse aliases: a few of them can stand for gigabytes."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a name that stands there twice: the first would be lost without a word."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} stands here a second time", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_UNWANTED = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _UNWANTED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
        r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)


class _Dumper(yaml.SafeDumper):
    """Puts in quotes what the loader would not take for a string."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def load_job(
    path: Path | None,
    given: Mapping[str, Any],
    *,
    folder: Path,
    use: str = "training",
    given_by: str = "the command line",
) -> JobSpec:
    """Return the job that a file and the command line describe; the command line wins.

    One file may name the data of training, evaluation and prediction; the job is what ``use``
    says. To evaluate or predict is a job of its own, ``NAME-evaluation`` or ``NAME-prediction``,
    with the model of job NAME.

    Args:
        path: The job file; None: the command line says everything.
        given: Values by dotted name, ``workers.initial`` for one.
        folder: What relative paths in ``given`` are relative to, an absolute path.
        use: ``training``, ``evaluation`` or ``prediction``.
        given_by: What has given ``given``, for errors.

    Returns:
        The job, with absolute paths.

    Raises:
        ConfigError: The file cannot be read or is not YAML, or a field is unknown, missing or
            wrong. The message has the file and line, or says that it came from the command line.
    """
    document: dict[str, Any] = {}
    lines: dict[str, int] = {}
    if path is not None:
        document, lines = _read(path)
    home = folder if path is None else path.absolute().parent
    overrides: dict[str, Any] = {}
    try:
        for name, value in given.items():
            _put(overrides, name.split("."), value)
        _make_absolute(overrides, folder)
        _make_absolute(document, home)
        document = _merged(JobSpec, document, overrides)
        return JobSpec.from_mapping(_for_use(document, use, home))
    except ConfigError as error:
        raise _located(error, path, lines, given, given_by) from error


def parse_value(text: str) -> Any:
    """Return the value of ``--set NAME=VALUE``: YAML, as in the file.

    Raises:
        ConfigError: It is no YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r} is not a YAML value: {_reason(error)}") from error


def to_yaml(spec: JobSpec) -> str:
    """Return the job as a job file with every field."""
    text: str = yaml.dump(spec.to_mapping(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the document, and the line of each dotted name."""
    if path.suffix == ".py":
        raise ConfigError(
            f"{path} is a Python file, and a job file (YAML) is expected; the model file is given "
            f"by `model:` in it, or by --model {path}"
        )
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the job file {str(path)!r}: {error.strerror}") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"the job file {str(path)!r} is larger than {FILE_BYTES_MAX} bytes")
    try:
        loader = _Loader(content)
        try:
            node = loader.get_single_node()
            document = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}{_line_of(error)}: not a job file: {_reason(error)}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: not a job file: it must be a list of `name: value` lines")
    lines: dict[str, int] = {}
    _collect_lines(node, "", lines)
    return document, lines


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        return error.problem
    return str(error)


def _line_of(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1}"


def _collect_lines(node: yaml.Node | None, prefix: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            lines[name] = key.start_mark.line + 1
            _collect_lines(value, f"{name}.", lines)


def _put(document: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        below = document.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{'.'.join(names)}: given as well as {name}; give one of them")
        document = below
    document[names[-1]] = value


def _merged(kind: type, below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``below`` with the values of ``above``; parts of a nested field are merged."""
    hints = {item.name: nested_kind(kind, item.name) for item in fields(kind)}
    merged = dict(below)
    for name, value in above.items():
        nested = hints.get(name)
        old = merged.get(name)
        if nested is not None and old is not None and value is not None:
            old, value = _long(nested, old), _long(nested, value)
        if not isinstance(old, dict) or not isinstance(value, dict):
            merged[name] = value
        elif nested is not None:
            merged[name] = _merged(nested, old, value)
        else:
            merged[name] = {**old, **value}
    return merged


def _long(kind: type, value: Any) -> Any:
    """Return the mapping that a plain value stands for, if it can stand for one."""
    short = getattr(kind, "SHORT", None)
    return value if isinstance(value, dict) or short is None else {short: value}


def _make_absolute(document: dict[str, Any], folder: Path) -> None:
    """Make the relative paths of a document absolute, as far as it is well formed.

    Tables and queries of ``sql`` and topics are left alone; but for variables, so is what a
    custom reader takes.

    Raises:
        ConfigError: A path names a variable that is not set.
    """
    for name in ("model", "output", "log_dir"):
        if name in document:
            document[name] = _absolute(name, document[name], folder)
    for name in ("checkpoint", "exports"):
        section = document.get(name)
        if isinstance(section, dict) and "url" in section:
            section["url"] = _absolute(f"{name}.url", section["url"], folder)
    if isinstance(document.get("exports"), str):
        document["exports"] = _absolute("exports", document["exports"], folder)
    for name in _DATA_FIELDS:
        data = document.get(name)
        if not isinstance(data, dict):
            document |= {name: _absolute(name, data, folder)} if data is not None else {}
        elif "paths" in data and data.get("kind") not in ("kafka", "sql"):
            home = None if data.get("kind") == "custom" else folder
            data["paths"] = _absolute(f"{name}.paths", data["paths"], home)


def _absolute(name: str, value: Any, folder: Path | None) -> Any:
    """Return a path, or a list of them, as absolute, with variables put in; else what it is."""
    if isinstance(value, (list, tuple)):
        return [_absolute(name, one, folder) for one in value]
    if not isinstance(value, str) or not value:
        return value
    value = _VARIABLE.sub(partial(_variable, name), value)
    if folder is None or _URL.match(value):
        return value
    return str(folder / Path(value).expanduser())


def _variable(name: str, found: re.Match[str]) -> str:
    variable = found[1] or found[2]
    if not os.environ.get(variable):
        raise ConfigError(f"{name}: the environment variable {variable} is not set")
    return os.environ[variable]


def _for_use(document: dict[str, Any], use: str, home: Path) -> dict[str, Any]:
    """Return the document of the job that trains, evaluates or predicts."""
    name = document.get("name")
    if not isinstance(name, str):
        # JobSpec says it better.
        return document
    data = "validation" if use == "evaluation" else use
    if document.get(data) is None:
        raise ConfigError(f"{data}: is missing; name the records, in the file or by --{data}")
    log_dir = document.get("log_dir") or str(home / "backstay-jobs" / name)
    if use == "training":
        kept = {key: value for key, value in document.items() if key != "prediction"}
        return {**kept, "log_dir": log_dir}
    unused = {"training", "early_stop", "evaluation_every_steps", "audit", "checkpoint", "schedule"}
    unused |= {"progressive", "alerts", "period"}
    unused |= {"prediction" if use == "evaluation" else "validation"}
    kept = {key: value for key, value in document.items() if key not in unused}
    checkpoint = document.get("checkpoint")
    url = checkpoint.get("url") if isinstance(checkpoint, dict) else ""
    kept["checkpoint"] = {"every": "none", "url": url or f"{log_dir}/checkpoints"}
    if not document.get("model_from"):
        kept |= {"model_from": name, "name": f"{name}-{use}"}
        log_dir = f"{log_dir}-{use}"
    return {**kept, "log_dir": log_dir}


def _located(
    error: ConfigError,
    path: Path | None,
    lines: Mapping[str, int],
    given: Mapping[str, Any],
    given_by: str,
) -> ConfigError:
    """Return the error with where its field was set, as far as that is known."""
    text = str(error)
    parts = text.partition(":")[0].split(".")
    # The field itself, else the nearest one around it that stands somewhere.
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in given or (
            name not in lines and any(one.startswith(f"{name}.") for one in given)
        ):
            return ConfigError(f"{text} (from {given_by})")
        if name in lines:
            return ConfigError(f"{path}, line {lines[name]}: {text}")
    return error if path is None else ConfigError(f"{path}: {text}")
