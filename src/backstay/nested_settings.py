"""The machinery of nested settings: frozen dataclasses made from documents such as a job file.

``backstay.settings`` is for flat configurations of processes; here a value may be a list of
texts, a mapping or another frozen dataclass. A wrong one is refused with its dotted name first:
``training.kind: 'cvs' is not one of ...``, so that a caller can say where in its document that is.

It imports ``backstay.settings`` and ``backstay.errors`` only, and does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from backstay.errors import ConfigError
from backstay.settings import suggestion

__all__ = [
    "check_entries",
    "entries",
    "entry",
    "from_mapping",
    "named",
    "nested_kind",
    "to_mapping",
]

SpecT = TypeVar("SpecT")
# Deeper than any sensible parameter of a model; ends a document that refers to itself.
DEPTH_MAX = 16
_WORDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def entry(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    fixed: bool = False,
) -> Any:
    """Return a dataclass field.

    Args:
        default: Its default value; ``...`` if there is none; a function makes a new one each time.
        doc: One or two sentences for ``--help`` and the reference page.
        minimum: Least value of a number.
        maximum: Greatest value of a number.
        choices: The values that are allowed.
        fixed: It cannot be changed once the job has begun: what was done would no longer fit.
    """
    metadata = {
        "doc": doc,
        "minimum": minimum,
        "maximum": maximum,
        "choices": tuple(choices),
        "fixed": fixed,
    }
    if default is ...:
        return field(metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def entries(kind: type, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield (dotted name, field, type) of each field, those of nested dataclasses after theirs."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        yield prefix + item.name, item, hints[item.name]
        nested = _nested(hints[item.name])
        if nested is not None:
            yield from entries(nested, f"{prefix}{item.name}.")


def nested_kind(kind: type, name: str) -> type | None:
    """Return the dataclass that a field holds (it, or None); None if it holds something else."""
    return _nested(get_type_hints(kind)[name])


def check_entries(spec: Any) -> None:
    """Check the fields of a dataclass, each alone, and put lists, mappings and numbers in order.

    Called in ``__post_init__``: lists become tuples, mappings are copied, integers become
    floats where a float is wanted.

    Raises:
        ConfigError: One is wrong; the message begins with its name.
    """
    hints = get_type_hints(type(spec))
    for item in fields(spec):
        value = _checked(item.name, getattr(spec, item.name), hints[item.name])
        object.__setattr__(spec, item.name, value)
        choices = item.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(
                f"{item.name}: {value!r} is not one of {', '.join(choices)}"
                f"{suggestion(value, choices)}"
            )
        low, high = item.metadata["minimum"], item.metadata["maximum"]
        if (low is not None and value < low) or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"{low} to {high}"
            raise ConfigError(f"{item.name}: {value!r} is out of range; allowed is {allowed}")


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
    values: dict[str, Any] = {}
    for name, value in document.items():
        if name not in hints or name == "SHORT":
            names = [item.name for item in fields(kind)]  # type: ignore[arg-type]
            raise ConfigError(
                f"{name}: no such field{suggestion(str(name), names)}; there are {', '.join(names)}"
            )
        nested = _nested(hints[name])
        if nested is not None and value is not None and not is_dataclass(value):
            with named(name):
                values[name] = from_mapping(nested, value)
        else:
            values[name] = value
    for item in fields(kind):  # type: ignore[arg-type]
        if item.name not in values and item.default is item.default_factory is MISSING:
            raise ConfigError(f"{item.name}: is missing; {item.metadata['doc']}")
    return kind(**values)


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


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return value


def _checked(name: str, value: Any, hint: Any) -> Any:
    """Return the value as the field holds it."""
    if type(None) in get_args(hint):
        if value is None:
            return None
        hint = next(one for one in get_args(hint) if one is not type(None))
    if hint is float and type(value) is int:
        value = float(value)
    if hint in _WORDS:
        if type(value) is not hint:
            raise ConfigError(f"{name}: {value!r} is not {_WORDS[hint]}")
        if hint is float and not math.isfinite(value):
            raise ConfigError(f"{name}: {value!r} is not a finite number")
        return value
    check = _CONTAINERS.get(get_origin(hint) or hint)
    if check is not None:
        return check(name, value, get_args(hint))
    if not isinstance(value, hint):
        raise ConfigError(f"{name}: {value!r} is not a {hint.__name__}")
    return value


def _checked_texts(name: str, value: Any, _arguments: tuple[Any, ...]) -> tuple[str, ...]:
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
    if value is None or type(value) in _WORDS:
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
    tuple: _checked_texts,
    Mapping: _checked_mapping,
}
