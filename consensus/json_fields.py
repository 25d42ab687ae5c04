"""Taking apart the JSON texts that are not typed records yet: those of a job's tasks and schedule.

A record that a process of another version wrote must not be half understood: it has the fields
expected, of the types expected, and no others. New records are ``consensus.json_record``'s. This
module imports that one and ``backstay.errors``; it knows no record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from backstay.consensus.json_record import NUMBER_MAX, dump
from backstay.errors import InvalidRequest

__all__ = [
    "dump",
    "fields_of",
    "integers_of",
    "parse_fields",
    "strings_of",
]


def parse_fields(
    what: str, text: str, expected: Mapping[str, type], added: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fields of a JSON object given as text.

    Args:
        what: Name of the record, for the error.
        text: The JSON text.
        expected: Exactly the fields it must have, with their types.
        added: Fields of ``expected`` that an older record may lack, with the values they have then.

    Raises:
        InvalidRequest: It is not of that form.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{what}: not JSON: {error}") from error
    if added and isinstance(document, dict):
        document = {**added, **document}
    return fields_of(what, document, expected)


def fields_of(what: str, value: object, expected: Mapping[str, type]) -> dict[str, Any]:
    """Return a JSON object's fields, after a check that they are exactly the expected ones.

    Raises:
        InvalidRequest: It is no such object; the message names the first thing that is wrong.
    """
    if not isinstance(value, dict) or value.keys() != expected.keys():
        raise InvalidRequest(f"{what}: expected an object with the fields {', '.join(expected)}")
    for name, kind in expected.items():
        if type(value[name]) is not kind:
            raise InvalidRequest(f"{what}: {name} is not of type {kind.__name__}")
    return value


def integers_of(what: str, name: str, values: object, lowest: int = 0) -> list[int]:
    """Return a list of integers, each ``lowest`` to ``NUMBER_MAX``.

    Raises:
        InvalidRequest: It is no such list.
    """
    # set(map(type, ...)) is one pass in C; a routing table has some 200,000 numbers.
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise InvalidRequest(f"{what}: {name} holds more than integers")
    if values and not (lowest <= min(values) and max(values) <= NUMBER_MAX):
        raise InvalidRequest(f"{what}: {name} holds a number outside {lowest} to {NUMBER_MAX}")
    return values


def strings_of(what: str, name: str, values: object) -> list[str]:
    """Return a list of strings.

    Raises:
        InvalidRequest: It is no such list.
    """
    if not isinstance(values, list) or not set(map(type, values)) <= {str}:
        raise InvalidRequest(f"{what}: {name} holds more than strings")
    return values
