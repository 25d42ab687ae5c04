"""A second implementation of proto/data_plane.md, version 2, with ``struct`` and nothing else.

Written from the specification alone: what the native module encodes is held to the vectors
that tools/make_wire_vectors.py writes with this. Imports nothing of backstay.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

Fields = dict[str, Any]

MAGIC = b"BKSY"
VERSION = 2
CHECKSUM = 1
MASK = 2**64 - 1
HEADER = struct.Struct("<4sBBHQIIQ")
MAX_META_BYTES = 4096
MAX_TEXT_BYTES = 1024

OPCODES = {
    "Hello": 0x01,
    "HelloReply": 0x81,
    "Ping": 0x02,
    "Pong": 0x82,
    "Pull": 0x10,
    "PullReply": 0x90,
    "Push": 0x11,
    "PushReply": 0x91,
    "CloseStream": 0x12,
    "CloseStreamReply": 0x92,
    "Delete": 0x13,
    "DeleteReply": 0x93,
    "Expire": 0x14,
    "CountExpired": 0x15,
    "Decay": 0x16,
    "ExpireReply": 0x94,
    "GoAway": 0xFE,
    "Error": 0xFF,
}
STREAM = (("job", "Q"), ("pass", "I"), ("task", "I"))
# "t" is a text; "1x" and "5x" are reserved bytes; "Q?" is there or not, with all behind it.
PUSH = (
    ("table", "Q"),
    ("routing_version", "Q"),
    *STREAM,
    ("sequence", "Q"),
    ("floor", "Q"),
    ("key_count", "I"),
    ("row_elements", "I"),
    ("learning_rate_scale", "f"),
    ("kind", "B"),
    ("flags", "B"),
    ("compensation", "B"),
    ("reserved", "1x"),
)
EXPIRE = (
    *PUSH,
    ("thresholds", "I"),
    ("unseen_seconds", "I"),
    ("score_below", "d"),
    ("norm_below", "d"),
)
META: dict[str, tuple[tuple[str, str], ...]] = {
    "Hello": (("cluster_id", "t"), ("token", "t"), ("client_name", "t")),
    "HelloReply": (
        ("instance", "Q"),
        ("max_frame_bytes", "Q"),
        ("max_keys", "I"),
        ("slot_count", "I"),
        ("routing_version", "Q"),
        ("node_id", "t"),
    ),
    "Ping": (),
    "Pong": (),
    "Pull": (
        ("table", "Q"),
        ("routing_version", "Q"),
        ("key_count", "I"),
        ("row_elements", "I"),
        ("flags", "Q?"),
    ),
    "PullReply": (("routing_version", "Q"), ("row_count", "I"), ("row_elements", "I")),
    "Push": PUSH,
    "PushReply": (
        ("routing_version", "Q"),
        ("applied_slots", "I"),
        ("skipped_slots", "I"),
        ("known_slots", "Q?"),
        ("unknown_slots", "Q?"),
        ("staleness_sum", "Q?"),
        ("staleness_max", "Q?"),
    ),
    "CloseStream": (*STREAM, ("routing_version", "Q")),
    "CloseStreamReply": (),
    "Delete": PUSH,
    "DeleteReply": (
        ("routing_version", "Q"),
        ("applied_slots", "I"),
        ("skipped_slots", "I"),
        ("rows", "Q"),
    ),
    "Expire": EXPIRE,
    "CountExpired": EXPIRE,
    "Decay": PUSH,
    "ExpireReply": (
        ("routing_version", "Q"),
        ("applied_slots", "I"),
        ("skipped_slots", "I"),
        ("unseen", "Q"),
        ("score", "Q"),
        ("norm", "Q"),
        ("counters", "Q"),
    ),
    "GoAway": (),
    "Error": (("code", "H"), ("retry_safe", "B"), ("reserved", "5x"), ("routing_version", "Q")),
}


class Frame(NamedTuple):
    """A frame taken apart; ``fields`` is its meta part."""

    kind: str
    flags: int
    request_id: int
    fields: Fields
    body: bytes


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of ``data``, bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def encode_meta(kind: str, fields: Fields) -> bytes:
    """Return a meta part; ``fields`` has exactly the fields of its kind."""
    out = b""
    for name, form in META[kind]:
        if form == "t":
            text = fields[name].encode()
            out += struct.pack("<H", len(text)) + text
        elif form.endswith("x"):
            out += struct.pack(form)
        elif form.endswith("?") and name not in fields:
            break
        else:
            out += struct.pack("<" + form.rstrip("?"), fields[name])
    return out


def encode(frame: Frame) -> bytes:
    """Return a frame's bytes, with its checksum if its flags say so."""
    meta = encode_meta(frame.kind, frame.fields)
    checksum = crc32c(meta + frame.body) if frame.flags & CHECKSUM else 0
    sizes = (len(meta), checksum, len(frame.body))
    opcode = OPCODES[frame.kind]
    header = HEADER.pack(MAGIC, VERSION, opcode, frame.flags, frame.request_id, *sizes)
    return header + meta + frame.body


def decode(data: bytes) -> Frame:
    """Take exactly one good frame apart."""
    magic, version, opcode, flags, request_id, meta_bytes, checksum, body_bytes = (
        HEADER.unpack_from(data)
    )
    kind = next(name for name, code in OPCODES.items() if code == opcode)
    rest = data[HEADER.size :]
    assert (magic, version, len(rest)) == (MAGIC, VERSION, meta_bytes + body_bytes)
    assert checksum == (crc32c(rest) if flags & CHECKSUM else 0)
    return Frame(kind, flags, request_id, decode_meta(kind, rest[:meta_bytes]), rest[meta_bytes:])


def decode_meta(kind: str, meta: bytes) -> Fields:
    """Take a meta part apart; it has no bytes too few or too many."""
    fields = dict(_parts(kind, meta))
    assert encode_meta(kind, fields) == meta
    return fields


def _parts(kind: str, meta: bytes) -> Iterator[tuple[str, Any]]:
    at = 0
    for name, form in META[kind]:
        if form == "t":
            (length,) = struct.unpack_from("<H", meta, at)
            yield name, meta[at + 2 : at + 2 + length].decode()
            at += 2 + length
        elif form.endswith("?") and at == len(meta):
            break
        else:
            form = form.rstrip("?")
            values = struct.unpack_from("<" + form, meta, at)
            if values:
                yield name, values[0]
            at += struct.calcsize("<" + form)


def mix64(x: int) -> int:
    """Return the mixed bits of a key."""
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & MASK
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & MASK
    return x ^ x >> 33


def slot_of(key: int, slot_count: int) -> int:
    """Return the slot of a key: the top bits of its mix."""
    return mix64(key) * slot_count >> 64


def table_id(name: str) -> int:
    """Return a table's id: the mixed FNV-1a of its name."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 & MASK
    return mix64(value)


def dense_block_key(table: int, block: int) -> int:
    """Return the key of one block of a dense table."""
    return table + block & MASK
