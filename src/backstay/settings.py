"""Settings: declare one, check it, load it, say where its value comes from.

A configuration is a frozen dataclass whose fields are made by ``setting``. ``check`` is called when
one is made, so a configuration that exists is a valid one. Two ways lead to it:

- ``load`` fills a flat one, as servers and clients have it, from an explicit argument, else a TOML
  file, else the environment, else the default. It keeps the source of each value.
- ``from_mapping`` fills a nested one from a document, as a job file is. An error begins with the
  dotted name of the field, ``training.kind: 'cvs' is not one of ...``, so that the caller can say
  where in its document the field stands.

This module imports ``backstay.errors`` only and knows no particular configuration. The
environment is an argument; the only file it reads is the one it is given.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from backstay.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "ENVIRONMENT_PREFIX",
    "Found",
    "Loaded",
    "all_settings",
    "check",
    "check_name",
    "find",
    "from_mapping",
    "load",
    "named",
    "nested_kind",
    "read_section",
    "setting",
    "suggestion",
    "to_mapping",
]

ENVIRONMENT_PREFIX = "BACKSTAY_"
# Deeper than any sensible parameter of a model; ends a document that refers to itself.
DEPTH_MAX = 16
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_TYPE_WORDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


class Configuration(Protocol):
    """A frozen dataclass whose fields were made by ``setting``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


ConfigT = TypeVar("ConfigT", bound=Configuration)
SpecT = TypeVar("SpecT")


def setting(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Collection[str] = (),
    secret: bool = False,
    fixed: bool = False,
    parse: Callable[[str], object] | None = None,
) -> Any:
    """Return a dataclass field.

    Args:
        default: Its default value; ``...`` if there is none; a function makes a new one each time.
        doc: One or two sentences for ``--help`` and the reference page.
        minimum: Least value of a number.
        maximum: Greatest value of a number.
        choices: The values that are allowed.
        secret: Never show the value.
        fixed: It cannot be changed once the job has begun: what was done would no longer fit.
        parse: Makes the value out of a string, for a type of its own. The configuration checks it.
    """
    metadata = {
        "doc": doc,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "fixed": fixed,
        "parse": parse,
    }
    if default is ...:
        return field(repr=not secret, metadata=metadata)
    if callable(default):
        return field(default_factory=default, repr=not secret, metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


def check(config: Configuration) -> None:
    """Check the fields, each alone: type, choices, bounds.

    It is called in ``__post_init__``. Lists become tuples, mappings are copied, and integers become
    floats where a float is wanted.

    Raises:
        ConfigError: One is wrong; the message begins with its name, and says what is allowed.
    """
    hints = get_type_hints(type(config))
    for item in fields(config):
        value = getattr(config, item.name)
        if value is None and item.default is None:
            continue
        shown = repr(value) if item.repr else "the value (not shown)"
        if item.metadata["parse"] is None:
            value = _checked(item.name, value, hints[item.name], shown)
            object.__setattr__(config, item.name, value)
        choices = item.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(
                f"{item.name}: {shown} is not one of {', '.join(choices)}"
                f"{suggestion(value, choices)}"
            )
        low, high = item.metadata["minimum"], item.metadata["maximum"]
        if (low is not None and value < low) or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"{low} to {high}"
            raise ConfigError(f"{item.name}: {shown} is out of range; allowed is {allowed}")


def check_name(setting: str, value: str) -> None:
    """Make sure that a value can be the name of a node or of a cluster.

    Raises:
        ConfigError: It cannot; the message names the setting.
    """
    if not _NAME.fullmatch(value):
        raise ConfigError(
            f"{setting}: {value!r} is not a name of 1 to 64 characters out of A-Z a-z 0-9 _ . -"
        )


@dataclass(frozen=True)
class Loaded(Generic[ConfigT]):
    """A configuration, and for each of its fields where the value came from."""

    config: ConfigT
    sources: Mapping[str, str]

    def describe(self) -> str:
        """Return one line per field: its value and its source; secrets are not shown."""
        lines = []
        from_profile: Mapping[str, object] = getattr(self.config, "from_profile", {})
        for item in fields(self.config):
            value, source = getattr(self.config, item.name), self.sources[item.name]
            if item.name in from_profile:
                value = from_profile[item.name]
                source = f"profile {getattr(self.config, 'profile', '')}"
            if isinstance(value, tuple):
                value = ",".join(map(str, value))
            shown = value if item.repr or value is None else "(not shown)"
            lines.append(f"{item.name} = {shown}  [{source}]")
        return "\n".join(lines)


class Found(NamedTuple):
    """A value as it was given, and where."""

    value: object
    source: str


def find(
    name: str,
    explicit: Mapping[str, object],
    section: Mapping[str, object],
    environment: Mapping[str, str],
    *,
    file: str | None = None,
) -> Found | None:
    """Return a setting's value: explicit argument, else file, else environment.

    The arguments are those of ``load``. None: the setting has its default.
    """
    variable = ENVIRONMENT_PREFIX + name.upper()
    if explicit.get(name) is not None:
        return Found(explicit[name], "argument")
    if name in section:
        return Found(section[name], f"file {file}")
    if environment.get(variable):
        return Found(environment[variable], f"environment {variable}")
    return None


def load(
    kind: type[ConfigT],
    section: Mapping[str, object],
    environment: Mapping[str, str],
    explicit: Mapping[str, object],
    *,
    file: str | None = None,
) -> Loaded[ConfigT]:
    """Return a configuration: explicit argument, else file, else environment, else default.

    Args:
        kind: The class of the configuration.
        section: What the file says, as ``read_section`` gave it.
        environment: Usually ``os.environ``; of it, only ``BACKSTAY_<FIELD>`` names are read, and
            an empty value counts as not set.
        explicit: Values given by the caller; None counts as not given.
        file: The file's name, for messages.

    Raises:
        ConfigError: A value is not allowed, or an explicit name is no field.
    """
    hints = get_type_hints(kind)
    names = sorted(item.name for item in fields(kind))
    for name in sorted(explicit.keys() - set(names)):
        if explicit[name] is not None:
            raise ConfigError(
                f"{name}: no such setting{suggestion(name, names)}; there are {', '.join(names)}"
            )
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for item in fields(kind):
        found = find(item.name, explicit, section, environment, file=file)
        sources[item.name] = "default" if found is None else found.source
        if found is None:
            continue
        # A file has types of its own; elsewhere everything may arrive as a string.
        kind_of_text = None if found.source == f"file {file}" else _without_none(hints[item.name])
        with _named_source(sources):
            values[item.name] = _convert(
                item.name, found.value, kind_of_text, item.metadata["parse"]
            )
    with _named_source(sources):
        return Loaded(kind(**values), sources)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` with the nearest of the known names; empty if none is."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def read_section(
    path: Path, wanted: str, known_keys: Mapping[str, Set[str]]
) -> Mapping[str, object]:
    """Return one section of a TOML file; empty if the file has no such section.

    Args:
        path: The file.
        wanted: The name of the section.
        known_keys: For each section that a file may have, the keys it may have.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or has an unknown section or key.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the file {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file {str(path)!r} is not TOML: {error}") from error
    for name, content in document.items():
        if name not in known_keys or not isinstance(content, dict):
            allowed = " and ".join(f"[{section}]" for section in known_keys)
            raise ConfigError(f"{path}: unknown section {name!r}; there are {allowed}")
        for key in content:
            if key not in known_keys[name]:
                nearest = suggestion(key, sorted(known_keys[name]))
                raise ConfigError(f"{path}: unknown key {key!r} in [{name}]{nearest}")
    section: Mapping[str, object] = document.get(wanted, {})
    return section


def all_settings(kind: type, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield (dotted name, field, type) of each field, those of nested dataclasses after theirs."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        yield prefix + item.name, item, hints[item.name]
        nested = _nested(hints[item.name])
        if nested is not None:
            yield from all_settings(nested, f"{prefix}{item.name}.")


def nested_kind(kind: type, name: str) -> type | None:
    """Return the dataclass that a field holds (it, or None); None if it holds something else."""
    return _nested(get_type_hints(kind)[name])


def from_mapping(kind: type[SpecT], document: object, *, short: bool = True) -> SpecT:
    """Return a dataclass from a mapping of plain values, as JSON and YAML give them.

    Args:
        kind: The dataclass. Its class attribute ``SHORT``, if it has one, names the field that a
            plain value stands for: ``mode: sync`` means ``mode: {kind: sync}``.
        document: The mapping.
        short: Whether a plain value may stand for the whole.

    Raises:
        ConfigError: A field is unknown, missing or wrong; the message begins with its dotted name.
    """
    main_field = getattr(kind, "SHORT", None)
    if not isinstance(document, Mapping):
        if main_field is None or not short:
            raise ConfigError(f": {document!r} is not a mapping of names to values")
        document = {main_field: document}
    hints = get_type_hints(kind)
    names = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in document.items():
        if name not in names:
            raise ConfigError(
                f"{name}: no such field{suggestion(str(name), names)}; there are {', '.join(names)}"
            )
        nested = _nested(hints[name])
        if nested is not None and get_origin(hints[name]) is tuple:
            values[name] = _from_list(name, nested, value)
        elif nested is not None and value is not None and not is_dataclass(value):
            with named(name):
                values[name] = from_mapping(nested, value)
        else:
            values[name] = value
    for item in fields(kind):  # type: ignore[arg-type]
        if item.name not in values and item.default is item.default_factory is MISSING:
            raise ConfigError(f"{item.name}: is missing; {item.metadata['doc']}")
    return kind(**values)


def _from_list(name: str, kind: type[SpecT], documents: object) -> tuple[SpecT, ...]:
    if not isinstance(documents, (list, tuple)):
        raise ConfigError(f"{name}: {documents!r} is not a list of mappings")
    made = []
    for number, one in enumerate(documents):
        with named(f"{name}.{number}"):
            made.append(one if isinstance(one, kind) else from_mapping(kind, one))
    return tuple(made)


def to_mapping(spec: Any) -> dict[str, Any]:
    """Return a dataclass as a mapping of plain values; ``from_mapping`` makes it again."""
    return {item.name: _plain(getattr(spec, item.name)) for item in fields(spec)}


@contextmanager
def named(prefix: str) -> Iterator[None]:
    """Put a name in front of the dotted name with which an error of the block begins."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        raise ConfigError(f"{prefix}{'' if text[0] == ':' else '.'}{text}") from error


@contextmanager
def _named_source(sources: Mapping[str, str]) -> Iterator[None]:
    """Add to an error, which begins with the setting's name, where the value came from."""
    try:
        yield
    except ConfigError as error:
        source = sources.get(str(error).partition(":")[0], "default")
        if source in ("default", "argument"):
            raise
        raise ConfigError(f"{error} (from {source})") from error


def _convert(name: str, raw: object, kind: object, parse: Callable[[str], object] | None) -> object:
    """Return ``raw`` as a value of the field."""
    if parse is not None:
        if isinstance(raw, list) and all(isinstance(entry, str) for entry in raw):
            raw = ",".join(raw)
        return parse(raw) if isinstance(raw, str) else raw
    if not isinstance(raw, str):
        return raw
    if kind is int or kind is float:
        try:
            return int(raw) if kind is int else float(raw)
        except ValueError:
            raise ConfigError(f"{name}: {raw!r} is not {_TYPE_WORDS[kind]}") from None
    if kind is bool:
        if raw.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"{name}: {raw!r} is not true or false")
        return raw.lower() in _TRUE
    return raw


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return value


def _without_none(hint: Any) -> Any:
    """Return the type behind "it or None"."""
    if type(None) in get_args(hint):
        return next(one for one in get_args(hint) if one is not type(None))
    return hint


def _checked(name: str, value: Any, hint: Any, shown: str) -> Any:
    """Return the value, which is not None by default, as the field holds it."""
    hint = _without_none(hint)
    if hint is float and type(value) is int:
        value = float(value)
    if hint in _TYPE_WORDS:
        if type(value) is not hint:
            raise ConfigError(f"{name}: {shown} is not {_TYPE_WORDS[hint]}")
        if hint is float and not math.isfinite(value):
            raise ConfigError(f"{name}: {shown} is not a finite number")
        return value
    check = _CONTAINERS.get(get_origin(hint) or hint)
    if check is not None:
        return check(name, value, get_args(hint))
    if not isinstance(value, hint):
        raise ConfigError(f"{name}: {shown} is not a {hint.__name__}")
    return value


def _checked_list(name: str, value: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if get_origin(arguments[0]) is Mapping:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name}: {value!r} is not a list of mappings")
        inner = get_args(arguments[0])
        return tuple(_checked_mapping(f"{name}.{i}", one, inner) for i, one in enumerate(value))
    kind = arguments[0]
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, (list, tuple)) or not all(isinstance(one, kind) for one in value):
            raise ConfigError(f"{name}: {value!r} is not a list of {kind.__name__}")
        return tuple(value)
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{name}: {value!r} is not a string or a list of strings")
    if "" in value:
        raise ConfigError(f"{name}: one of {list(value)!r} is empty")
    return tuple(value)


def _checked_mapping(name: str, value: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: {value!r} is not a mapping of names to values")
    texts = arguments[1] is str
    for key, one in value.items():
        if texts and not isinstance(one, str):
            raise ConfigError(f"{name}.{key}: {one!r} is not a string; put it in quotes")
    checked: dict[str, Any] = _checked_plain(name, value, 0)
    return checked


def _checked_plain(name: str, value: Any, depth: int) -> Any:
    """Return a copy of a value that JSON can hold and give back unchanged."""
    if depth > DEPTH_MAX:
        raise ConfigError(f"{name}: it is nested more than {DEPTH_MAX} deep")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{name}: the name {key!r} is not a string; put it in quotes")
        return {key: _checked_plain(f"{name}.{key}", one, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_checked_plain(f"{name}.{i}", one, depth + 1) for i, one in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}: {value!r} is not a finite number")
    if value is None or type(value) in _TYPE_WORDS:
        return value
    raise ConfigError(
        f"{name}: {value!r} is not a string, a number, true or false, a list or a map"
    )


def _nested(hint: Any) -> type | None:
    """Return the dataclass behind a type, or behind "it or None"; else None."""
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and is_dataclass(kind):
            return kind
    return None


_CONTAINERS: Mapping[Any, Callable[[str, Any, tuple[Any, ...]], Any]] = {
    tuple: _checked_list,
    Mapping: _checked_mapping,
}
