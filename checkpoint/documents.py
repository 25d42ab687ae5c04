"""JSON documents that carry their own checksum, read strictly: manifests, an export's index.

Any program may have written to where they are kept, so nothing is believed before it is checked.
Imports ``json_record`` and ``backstay.errors``; never does I/O.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from backstay.errors import InvalidRequest
from backstay.json_record import JsonRecord

__all__ = [
    "DOCUMENT_BYTES_MAX",
    "FileEntry",
    "checksum_of",
    "parse_json",
    "parse_object",
    "write_object",
]

# The manifest of a cluster of the most slots, with long numbers, needs less than half of it.
DOCUMENT_BYTES_MAX = 256 * 1024 * 1024


@dataclass(frozen=True)
class FileEntry(JsonRecord):
    """What a document says of a file beside it."""

    file: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        """Refuse a path that leads out of the folder."""
        if PurePath(self.file).name != self.file or self.file in ("", ".", ".."):
            raise InvalidRequest(f"{self.file!r} leads out of the folder")


def checksum_of(document: Mapping[str, object]) -> str:
    """Return the checksum of a JSON object: SHA-256 of its compact form with sorted keys.

    Raises:
        InvalidRequest: It cannot be written as JSON: NaN, infinity, half a surrogate pair, a
            value of another type.
    """
    try:
        return hashlib.sha256(_compact(document).encode()).hexdigest()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"not to be written as JSON: {error}") from error


def write_object(document: Mapping[str, object]) -> str:
    """Return a JSON object as a string, with its ``checksum`` added.

    Raises:
        InvalidRequest: It cannot be written as JSON.
    """
    return _compact({**document, "checksum": checksum_of(document)})


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object of a string of ours, without its ``checksum``, which must be right.

    Raises:
        InvalidRequest: It is no such string.
    """
    if len(text) > DOCUMENT_BYTES_MAX:
        raise InvalidRequest(f"{len(text)} bytes; at most {DOCUMENT_BYTES_MAX}")
    document = parse_json(text)
    said = document.pop("checksum", None)
    if said != checksum_of(document):
        raise InvalidRequest("its checksum is wrong: the file was changed or cut short")
    return document


def parse_json(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object of a string, in which no name comes twice.

    Raises:
        InvalidRequest: It is no such string.
    """
    try:
        document = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not a JSON object: {error}") from error
    if not isinstance(document, dict):
        raise InvalidRequest("not a JSON object")
    return document


def _compact(document: Mapping[str, object]) -> str:
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that comes twice: readers would differ in which of the two they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice in an object")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
