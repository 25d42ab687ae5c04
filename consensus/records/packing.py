"""Large records as strings that fit into one value of a coordination store.

A short text is kept as it is, readable with the store's own tools; a long one becomes
``{"packed":"zlib+base64","bytes":n,"data":"..."}``. This module imports the standard library and
``backstay.errors`` only; it does not look into what it packs.
"""

from __future__ import annotations

import base64
import json
import zlib

from backstay.errors import InvalidRequest

__all__ = ["PACKED_OVER_BYTES", "UNPACKED_BYTES_MAX", "pack", "unpack"]

# Longer strings are packed.
PACKED_OVER_BYTES = 131_072
# No text is unpacked to more: a small damaged record must not fill the memory.
UNPACKED_BYTES_MAX = 67_108_864

_METHOD = "zlib+base64"
_BEGIN = '{"packed":'
# The fastest: lists of numbers shrink to a third or less by any.
_LEVEL = 1


def pack(text: str) -> str:
    """Return a string to be stored: this one, or a shorter one that ``unpack`` leads back."""
    content = text.encode()
    if len(content) <= PACKED_OVER_BYTES:
        return text
    data = base64.b64encode(zlib.compress(content, _LEVEL)).decode()
    fields = {"packed": _METHOD, "bytes": len(content), "data": data}
    return json.dumps(fields, separators=(",", ":"))


def unpack(stored: str) -> str:
    """Return the string that ``pack`` was given.

    Raises:
        InvalidRequest: It was packed by another method, or is damaged.
    """
    if not stored.startswith(_BEGIN):
        return stored
    try:
        fields = json.loads(stored)
        method, count, data = fields["packed"], fields["bytes"], fields["data"]
    except (ValueError, KeyError) as error:
        raise InvalidRequest(f"packed record: {error}") from error
    if method != _METHOD or type(count) is not int or type(data) is not str:
        raise InvalidRequest(f"packed record: {method!r}, this version reads {_METHOD} only")
    if not 0 <= count <= UNPACKED_BYTES_MAX:
        raise InvalidRequest(f"packed record: {count} bytes; at most {UNPACKED_BYTES_MAX}")
    inflater = zlib.decompressobj()
    try:
        content = inflater.decompress(base64.b64decode(data, validate=True), count + 1)
        text = content.decode()
    except (zlib.error, ValueError) as error:
        raise InvalidRequest(f"packed record: damaged: {error}") from error
    if len(content) != count or not inflater.eof:
        raise InvalidRequest(f"packed record: damaged: not the {count} bytes it names")
    return text
