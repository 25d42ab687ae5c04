"""Write proto/vectors/: frames, damaged frames and hashes of one version of the data plane.

They come from the second implementation in tests/unit/wire_v2.py, so that they hold what
proto/data_plane.md says and not whatever the Rust code does. Run by hand when a kind of frame is
added; vectors of a version that is spoken must never change::

    python -m tools.make_wire_vectors

Imports the standard library and that module; nothing of backstay.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tests.unit import wire_v2 as wire

TARGET = Path(__file__).resolve().parent.parent / "proto" / "vectors"
# What the receiver of the damaged frames accepts.
MAX_FRAME_BYTES = 1 << 20
TEXT = "näme ☂"
STREAM = {"job": wire.MASK, "pass": 7, "task": 0x01020304}
BIG = 0x0123456789ABCDEF
EMB = wire.table_id("emb")


def push(kind: int, scale: float, **changes: int) -> wire.Fields:
    fields: wire.Fields = {
        "table": EMB,
        "routing_version": 3,
        **STREAM,
        "sequence": 130,
        "floor": 3,
    }
    fields |= {"key_count": 2, "row_elements": 3, "learning_rate_scale": scale, "kind": kind}
    fields |= {"flags": 0, "compensation": 0}
    return fields | changes


def frames_of_origins(
    pull: wire.Fields, pulled: wire.Fields, pushed: wire.Fields
) -> list[tuple[str, wire.Frame]]:
    """From where gradients come, how stale they are, and the weights that they come with."""
    keys = struct.pack("<2Q", 1, wire.MASK)
    rows = struct.pack("<6f", 0.0, -0.0, 1.5, -1e30, 1e-40, 0.1)
    weighted = struct.pack("<8f", *range(8))
    summed = struct.pack("<10f", *range(10))
    # Of two slots; an odd number of values is filled up to a whole word.
    origins = struct.pack("<2Q", 7 << 40 | 12, wire.MASK)
    odd = struct.pack("<Q3f4x", 1, 0.5, -1.0, 0.0)
    stale = {"known_slots": 1, "unknown_slots": 2, "staleness_sum": BIG, "staleness_max": 9}
    return [
        (
            "push with weights",
            wire.Frame("Push", 0, 3, push(8, 0.5, row_elements=4), keys + weighted),
        ),
        (
            "push with weights, shows and clicks",
            wire.Frame("Push", 0, 3, push(9, 0.5, row_elements=4), keys + weighted),
        ),
        (
            "push with sums",
            wire.Frame("Push", 0, 3, push(10, 0.5, row_elements=5), keys + summed),
        ),
        (
            "push with sums, shows and clicks",
            wire.Frame("Push", 0, 3, push(11, 0.5, row_elements=5), keys + summed),
        ),
        ("pull with sums", wire.Frame("Pull", 0, 2, {**pull, "flags": 2}, keys)),
        ("pull with origins and sums", wire.Frame("Pull", 0, 2, {**pull, "flags": 3}, keys)),
        (
            "pull reply with sums and origins",
            wire.Frame("PullReply", 0, 2, pulled, rows + weighted + origins),
        ),
        ("pull with origins", wire.Frame("Pull", 0, 2, {**pull, "flags": 1}, keys)),
        ("pull reply with origins", wire.Frame("PullReply", 0, 2, pulled, rows + origins)),
        (
            "push with origins",
            wire.Frame("Push", 0, 3, push(0, 0.5, key_count=1, flags=1), odd + origins[:8]),
        ),
        ("push reply with staleness", wire.Frame("PushReply", 0, 3, {**pushed, **stale}, b"")),
    ]


def good_frames() -> list[tuple[str, wire.Frame]]:
    keys = struct.pack("<2Q", 1, wire.MASK)
    rows = struct.pack("<6f", 0.0, -0.0, 1.5, -1e30, 1e-40, 0.1)
    hello = {"cluster_id": "census", "token": "", "client_name": TEXT}
    long = {"cluster_id": "c" * 1024, "token": "t" * 1024, "client_name": "n" * 1024}
    reply: wire.Fields = {
        "instance": BIG,
        "max_frame_bytes": 1 << 28,
        "max_keys": 1 << 22,
        "slot_count": 1024,
    }
    reply |= {"routing_version": 1, "node_id": "pserver-0"}
    pull = {"table": EMB, "routing_version": 3, "key_count": 2, "row_elements": 3}
    pulled = {"routing_version": 4, "row_count": 2, "row_elements": 3}
    pushed = {"routing_version": 4, "applied_slots": 1, "skipped_slots": 65535}
    error = {"code": 9, "retry_safe": 1, "routing_version": BIG}
    final = {"code": 6, "retry_safe": 0, "routing_version": 0}
    deleted = push(4, 1.0, row_elements=0)
    told = keys + struct.pack("<10f", *range(8), 3.0, 2.0)
    expired: wire.Fields = push(6, 1.0, row_elements=0)
    expired |= {"thresholds": 5, "unseen_seconds": 86400, "score_below": 0.0, "norm_below": 0.25}
    by_the_table = expired | {"thresholds": 0, "unseen_seconds": 0, "norm_below": 0.0}
    went = {**pushed, "unseen": BIG, "score": 2, "norm": 3, "counters": 4}
    sum_ = wire.CHECKSUM
    return [
        ("hello", wire.Frame("Hello", 0, 0, hello, b"")),
        ("hello with the longest texts", wire.Frame("Hello", 0, 0, long, b"")),
        ("hello reply", wire.Frame("HelloReply", 0, 0, reply, b"")),
        ("ping", wire.Frame("Ping", 0, BIG, {}, b"")),
        ("ping with a checksum", wire.Frame("Ping", sum_, 1, {}, b"")),
        ("pong", wire.Frame("Pong", 0, BIG, {}, b"")),
        ("pull", wire.Frame("Pull", 0, 2, pull, keys)),
        ("pull with a checksum", wire.Frame("Pull", sum_, 2, pull, keys)),
        ("pull reply", wire.Frame("PullReply", 0, 2, pulled, rows)),
        ("pull reply with a checksum", wire.Frame("PullReply", sum_, 2, pulled, rows)),
        ("push of gradients", wire.Frame("Push", 0, 3, push(0, 0.5), keys + rows)),
        ("push with a checksum", wire.Frame("Push", sum_, 3, push(0, 0.0), keys + rows)),
        ("push of weights", wire.Frame("Push", 0, wire.MASK, push(1, 1.0), keys + rows)),
        ("push of weights if absent", wire.Frame("Push", 0, 4, push(2, 1.0), keys + rows)),
        ("push reply", wire.Frame("PushReply", 0, 3, pushed, b"")),
        ("close stream", wire.Frame("CloseStream", 0, 5, {**STREAM, "routing_version": 3}, b"")),
        ("close stream reply", wire.Frame("CloseStreamReply", 0, 5, {}, b"")),
        ("delete", wire.Frame("Delete", 0, 6, deleted, keys)),
        ("delete with a checksum", wire.Frame("Delete", sum_, 6, deleted, keys)),
        ("delete reply", wire.Frame("DeleteReply", 0, 6, {**pushed, "rows": BIG}, b"")),
        (
            "push with shows and clicks",
            wire.Frame("Push", 0, 3, push(5, 0.5, row_elements=5), told),
        ),
        *frames_of_origins(pull, pulled, pushed),
        ("expire", wire.Frame("Expire", 0, 7, expired, keys)),
        ("expire by the table", wire.Frame("Expire", sum_, 7, by_the_table, keys)),
        ("count expired", wire.Frame("CountExpired", 0, 7, expired, keys)),
        ("decay", wire.Frame("Decay", 0, 8, push(7, 0.5, row_elements=0), keys)),
        ("expire reply", wire.Frame("ExpireReply", 0, 7, went, b"")),
        ("go away", wire.Frame("GoAway", 0, 0, {}, b"")),
        ("error to be tried again", wire.Frame("Error", 0, 2, error, "slot 5 ☂".encode())),
        ("error without a text", wire.Frame("Error", 0, 2, final, b"")),
    ]


def patched(data: bytes, at: int, form: str, value: int) -> bytes:
    out = bytearray(data)
    struct.pack_into("<" + form, out, at, value)
    return bytes(out)


def hostile_frames() -> list[dict[str, Any]]:
    """Damaged frames with what a receiver says: an error code, or that the frame is cut off."""
    good = {name: wire.encode(frame) for name, frame in good_frames()}
    ping, pull, hello = good["ping"], good["pull"], good["hello"]
    expire = good["expire"]
    gradients, summed = good["push of gradients"], good["push with a checksum"]
    header = [
        ("wrong magic", patched(ping, 0, "B", 0x62), 1),
        ("magic of the other byte order", patched(ping, 0, "I", 0x424B5359), 1),
        ("version 0", patched(ping, 4, "B", 0), 1),
        ("version 1", patched(ping, 4, "B", 1), 1),
        ("version 3", patched(ping, 4, "B", 3), 1),
        ("unknown opcode", patched(ping, 5, "B", 0x17), 1),
        ("opcode 0", patched(ping, 5, "B", 0), 1),
        ("unknown flag", patched(ping, 6, "H", 2), 1),
        ("checksum without its flag", patched(ping, 20, "I", 1), 1),
        ("meta over its limit", patched(ping, 16, "I", 4097), 1),
        ("meta of 2^32 - 1 bytes", patched(ping, 16, "I", 2**32 - 1), 1),
        ("body one byte over the limit", patched(pull, 24, "Q", MAX_FRAME_BYTES - 23), 8),
        ("body of 2^32 keys", patched(pull, 24, "Q", 2**35), 8),
        ("body of 2^64 - 1 bytes", patched(pull, 24, "Q", wire.MASK), 8),
        ("wrong checksum", patched(summed, 20, "I", 1), 1),
        ("body damaged under a checksum", patched(summed, len(summed) - 1, "B", 0xFF), 1),
    ]
    cut = [
        ("half a header", ping[:16], "truncated"),
        ("header without its meta", pull[:32], "truncated"),
        ("half a meta", pull[:40], "truncated"),
        ("body without its last byte", pull[:-1], "truncated"),
        ("body announced and none sent", patched(pull[:56], 24, "Q", 1 << 19), "truncated"),
    ]
    shorter = patched(pull[:55] + pull[56:], 16, "I", 23)
    longer = patched(pull[:56] + b"\0" + pull[56:], 16, "I", 25)
    not_utf8 = hello.replace("ä".encode(), b"\xff\xff")
    long_text = wire.HEADER.pack(wire.MAGIC, wire.VERSION, 1, 0, 0, 1031, 0, 0)
    long_text += struct.pack("<H", 1025) + b"x" * 1025 + bytes(4)
    meta = [
        ("meta one byte short", shorter, 1),
        ("meta one byte long", longer, 1),
        ("meta missing", patched(pull[:32], 24, "Q", 0)[:16] + bytes(16), 1),
        ("text longer than the meta", patched(hello, 32, "H", 900), 1),
        ("text over its limit", long_text, 1),
        ("text that is not UTF-8", not_utf8, 1),
        ("unknown kind of push", patched(gradients, 32 + 60, "B", 3), 1),
        ("unknown compensation", patched(gradients, 32 + 62, "B", 9), 1),
        ("unknown flag of a push", patched(gradients, 32 + 61, "B", 2), 1),
        ("origins without gradients", patched(good["push of weights"], 32 + 61, "B", 1), 5),
        ("unknown flag of a pull", patched(good["pull with origins"], 32 + 24, "Q", 4), 1),
        ("unknown threshold", patched(expire, 32 + 64, "I", 8), 1),
        ("threshold is NaN", patched(expire, 32 + 72, "Q", 0x7FF8000000000000), 5),
        ("decay above 1", patched(good["decay"], 32 + 56, "I", 0x3F8CCCCD), 5),
        ("scale is NaN", patched(gradients, 32 + 56, "I", 0x7FC00000), 5),
        ("scale is negative", patched(gradients, 32 + 56, "I", 0xBE800000), 5),
        ("scale is infinite", patched(gradients, 32 + 56, "I", 0x7F800000), 5),
    ]
    return [
        {"name": name, "part": part, "error": error, "hex": data.hex()}
        for part, cases in (("frame", header), ("frame", cut), ("meta", meta))
        for name, data, error in cases
    ]


def hashes() -> dict[str, Any]:
    keys = [0, 1, 2, 3, 1000, 2**32 - 1, 2**32, 2**53 + 1, BIG, 2**63 - 1, 2**63, wire.MASK]
    names = ["emb", "emb2", "a", "wide/linear_0.w_0", "A-z_0.9/x", "x" * 200]
    counts = [1, 2, 64, 1024, 65536]
    return {
        "mix64": [{"key": key, "mixed": wire.mix64(key)} for key in keys],
        "slots": [
            {"slot_count": n, "key": key, "slot": wire.slot_of(key, n)}
            for n in counts
            for key in keys
        ],
        "table_ids": [{"name": name, "id": wire.table_id(name)} for name in names],
        "dense_block_keys": [
            {"table": table, "block": block, "key": wire.dense_block_key(table, block)}
            for table in (EMB, wire.MASK)
            for block in (0, 1, 2**40 - 1)
        ],
    }


def vectors() -> dict[str, Any]:
    """The content of each file by its name."""
    frames = [
        {
            "name": name,
            "kind": frame.kind,
            "flags": frame.flags,
            "request_id": frame.request_id,
            "fields": frame.fields,
            "body": frame.body.hex(),
            "hex": wire.encode(frame).hex(),
        }
        for name, frame in good_frames()
    ]
    hostile = {"max_frame_bytes": MAX_FRAME_BYTES, "frames": hostile_frames()}
    return {"frames.json": frames, "hostile.json": hostile, "hashes.json": hashes()}


def main() -> None:
    for name, content in vectors().items():
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (TARGET / name).write_text(text + "\n", encoding="utf-8")
        print(f"wrote {TARGET / name}")


if __name__ == "__main__":
    main()
