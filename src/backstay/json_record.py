"""The JSON form of records: of the coordination store, and of an export's index.

A record is a frozen dataclass below ``JsonRecord``: its annotations say what the JSON object holds.
pydantic reads the object strictly: it refuses a field that is missing, unknown or of another type,
and names its path. This module imports ``backstay.errors``. It imports pydantic, which takes a
tenth of a second, when the first record is read. It knows no record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, cast

from annotated_types import Interval

from backstay.errors import InvalidRequest

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
    from pydantic_core import CoreSchema

__all__ = ["NUMBER_MAX", "Count", "JsonRecord", "Positive", "check_times", "dump"]

# What a JSON reader in any language keeps exactly as a signed 64-bit number.
NUMBER_MAX = 2**63 - 1
Count = Annotated[int, Interval(ge=0, le=NUMBER_MAX)]
Positive = Annotated[int, Interval(ge=1, le=NUMBER_MAX)]

Self = TypeVar("Self", bound="JsonRecord")
_NAMES: dict[type[Any], tuple[tuple[str, str], ...]] = {}
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


class JsonRecord:
    """Base of a frozen dataclass that is kept as a JSON object.

    The class statement takes these arguments:
        what: Name of the record in errors.
        names: By field its name in the JSON form, where that is another one.
        added: Fields that a record may lack, because it may be older than they are. They have their
            default then. Every other field must be in the JSON, whether it has a default or not.
    """

    _what: ClassVar[str]
    _added: ClassVar[frozenset[str]]
    __pydantic_config__: ClassVar[dict[str, Any]]

    def __init_subclass__(
        cls, what: str = "", names: Mapping[str, str] | None = None, added: Collection[str] = ()
    ) -> None:
        """Keep how the record is named and read."""
        super().__init_subclass__()
        stored = dict(names or {})
        cls._what = what
        cls._added = frozenset(added)
        cls.__pydantic_config__ = {
            "strict": True,
            "extra": "forbid",
            "alias_generator": lambda name: stored.get(name, name),
        }

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema of the dataclass, in which defaults make no field optional."""
        schema: Any = handler(source)
        for field in schema["schema"]["fields"]:
            if field["schema"]["type"] == "default" and field["name"] not in cls._added:
                field["schema"] = field["schema"]["schema"]
        return cast("CoreSchema", schema)

    def to_json(self) -> str:
        """Return the record as the JSON that the coordination store keeps."""
        return _encode(self)

    def to_document(self) -> dict[str, Any]:
        """Return the fields under the names of the JSON form, with their values as they are."""
        return {stored: getattr(self, name) for name, stored in _names(type(self))}

    @classmethod
    def from_json(cls: type[Self], text: str) -> Self:
        """Return the record that ``to_json`` gave.

        Raises:
            InvalidRequest: It is not of that form; the message names the field that is wrong.
        """
        from pydantic import ValidationError

        try:
            record: Self = _adapter(cls).validate_json(text)
        except ValidationError as error:
            # A record that checks itself names itself.
            words = _in_words(error).removeprefix(f"{cls._what}: ")
            raise InvalidRequest(f"{cls._what}: {words}") from error
        return record


def _plain(value: object) -> dict[str, Any]:
    """Return what JSON knows for a value that it does not know."""
    if isinstance(value, JsonRecord):
        return value.to_document()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not kept as JSON")


_encoder = json.JSONEncoder(separators=(",", ":"), default=_plain)


def _encode(value: object) -> str:
    text = _encoder.encode(value)
    if "\\ud" not in text:
        return text
    # A file name that is not UTF-8 comes with half a character, which no reader takes.
    whole = json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace")
    return _encoder.encode(json.loads(whole))


def dump(document: Mapping[str, object]) -> str:
    """Return an object as the JSON that the coordination store keeps."""
    return _encode(document)


def check_times(what: str, **times: float) -> None:
    """Refuse a time that is none: seconds since 1970-01-01 00:00 UTC are finite and not negative.

    Raises:
        InvalidRequest: One of them is no such number; the message names it.
    """
    for name, value in times.items():
        if not (math.isfinite(value) and value >= 0):
            raise InvalidRequest(f"{what}: {name} {value} is not in seconds since 1970")


def _names(kind: type[Any]) -> tuple[tuple[str, str], ...]:
    """Return each field's name, and its name in the JSON form."""
    found = _NAMES.get(kind)
    if found is None:
        stored = kind.__pydantic_config__["alias_generator"]
        found = _NAMES[kind] = tuple((one.name, stored(one.name)) for one in fields(kind))
    return found


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Return what reads the record; it is made once for each kind."""
    found = _ADAPTERS.get(kind)
    if found is None:
        from pydantic import TypeAdapter

        found = _ADAPTERS[kind] = TypeAdapter(kind)
    return found


def _in_words(error: ValidationError) -> str:
    """Return what is wrong and where, such as ``nodes[5].host: Field required``."""
    wrong = error.errors(include_url=False)
    # A record of another format lacks fields as well, but its format says why.
    other_format = [one for one in wrong if one["loc"] == ("format",)]
    wrong = other_format or wrong
    first = wrong[0]
    path = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
    # What a record refuses when it is made comes as "Value error, ...".
    said = first["msg"].removeprefix("Value error, ")
    if path == ".format" and first["type"] == "literal_error":
        said = f"{first['input']!r}; this version reads format {first['ctx']['expected']} only"
    text = f"{path.removeprefix('.')}: {said}" if path else said
    return text if len(wrong) == 1 else f"{text} (and {len(wrong) - 1} more)"
