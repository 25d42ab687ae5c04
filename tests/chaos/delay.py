"""Holds back packets: a program that reads a netfilter queue and lets each packet go later.

``python -m tests.chaos.delay QUEUE DELAY_MS JITTER_MS``, run inside a network namespace. It says
``up`` on standard output when it has the queue, and ends when standard input closes; what it holds
then goes on at once. The messages are those of linux/netfilter/nfnetlink_queue.h.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import socket
import struct
import sys
import time

__all__ = ["main"]

NETLINK_NETFILTER = 12
# Subsystem 3 (queue) in the high byte.
MSG_PACKET, MSG_VERDICT, MSG_CONFIG = 0x300, 0x301, 0x302
FLAGS_REQUEST, FLAGS_REQUEST_ACK = 1, 5
ATTRIBUTE_PACKET_HEADER, ATTRIBUTE_VERDICT_HEADER = 1, 2
CONFIG_COMMAND, CONFIG_PARAMETERS, CONFIG_MAX_LENGTH = 1, 2, 3
COMMAND_BIND, COPY_META, ACCEPT = 1, 1, 1
HEADER = struct.Struct("=IHHII")
GENERIC = struct.Struct("!BBH")
HELD_MAX = 65_536
RECEIVE_BUFFER = 4 << 20


def _attribute(kind: int, body: bytes) -> bytes:
    length = 4 + len(body)
    return struct.pack("=HH", length, kind) + body + b"\0" * (-length % 4)


def _message(kind: int, queue: int, attributes: bytes, flags: int) -> bytes:
    body = GENERIC.pack(socket.AF_UNSPEC, 0, queue) + attributes
    return HEADER.pack(HEADER.size + len(body), kind, flags, 0, 0) + body


def _configure(netlink: socket.socket, queue: int, attributes: bytes) -> None:
    netlink.send(_message(MSG_CONFIG, queue, attributes, FLAGS_REQUEST_ACK))
    answer = netlink.recv(65_536)
    (error,) = struct.unpack_from("=i", answer, HEADER.size)
    if error:
        raise OSError(-error, os.strerror(-error))


def _open(queue: int) -> socket.socket:
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    netlink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    netlink.bind((0, 0))
    command = struct.pack("!BBH", COMMAND_BIND, 0, socket.AF_INET)
    _configure(netlink, queue, _attribute(CONFIG_COMMAND, command))
    _configure(netlink, queue, _attribute(CONFIG_PARAMETERS, struct.pack("!IB", 0, COPY_META)))
    _configure(netlink, queue, _attribute(CONFIG_MAX_LENGTH, struct.pack("!I", HELD_MAX)))
    return netlink


def _packet_ids(data: bytes) -> list[int]:
    """Return the ids of the packets in what was received."""
    ids, offset = [], 0
    while offset + HEADER.size <= len(data):
        length, kind, *_ = HEADER.unpack_from(data, offset)
        at, end = offset + HEADER.size + GENERIC.size, offset + length
        while kind == MSG_PACKET and at + 4 <= end:
            size, attribute = struct.unpack_from("=HH", data, at)
            if attribute & 0x7FFF == ATTRIBUTE_PACKET_HEADER:
                ids.append(struct.unpack_from("!I", data, at + 4)[0])
            at += (size + 3) & ~3
        offset += max(HEADER.size, (length + 3) & ~3)
    return ids


def main(arguments: list[str]) -> None:
    """Hold packets back until standard input closes."""
    queue, delay_ms, jitter_ms = map(int, arguments)
    netlink = _open(queue)
    draw = random.Random(queue)
    held: list[tuple[float, int]] = []
    sys.stdout.write("up\n")
    sys.stdout.flush()

    def release(until_s: float) -> None:
        while held and held[0][0] <= until_s:
            body = struct.pack("!II", ACCEPT, heapq.heappop(held)[1])
            verdict = _attribute(ATTRIBUTE_VERDICT_HEADER, body)
            netlink.send(_message(MSG_VERDICT, queue, verdict, FLAGS_REQUEST))

    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select([netlink, sys.stdin], [], [], wait_s)
        if netlink in ready:
            try:
                data = netlink.recv(1 << 20)
            except OSError:
                # The queue overflowed: those packets are lost, which is a fault as well.
                data = b""
            for packet in _packet_ids(data):
                late_s = (delay_ms + draw.uniform(-jitter_ms, jitter_ms)) / 1000
                heapq.heappush(held, (time.monotonic() + max(0.0, late_s), packet))
        release(time.monotonic())
        if sys.stdin in ready:
            release(float("inf"))
            return


if __name__ == "__main__":
    main(sys.argv[1:])
