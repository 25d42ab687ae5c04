"""A trainer in a Pod: pushes until a file says stop, then says how often and what the rows hold.

Each acknowledged push adds 1 to every row, so a row that differs from the number of pushes tells of
a push that was lost or counted twice. It writes one JSON object a line.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client

STOP = Path("/tmp/stop")
KEYS = np.arange(2_000, dtype=np.uint64)
PAUSE_S = 0.02
SAY_EVERY = 50


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    spec = TableSpec.sparse("counted", 2, optimizer=SGD(1.0), initializer=Zeros())
    gradients = np.full((len(KEYS), 2), -1.0, np.float32)
    pushes, longest_s = 0, 0.0
    with Client(os.environ["BACKSTAY_ENDPOINT"]) as client:
        table = client.create_table(spec)
        before = client.pull(table, KEYS)
        while not STOP.exists():
            begun = time.monotonic()
            client.push(table, KEYS, gradients)
            longest_s = max(longest_s, time.monotonic() - begun)
            pushes += 1
            if pushes % SAY_EVERY == 1:
                say(pushes=pushes)
            time.sleep(PAUSE_S)
        rows = client.pull(table, KEYS) - before
    said = {
        "pushes": pushes,
        "least": float(rows.min()),
        "most": float(rows.max()),
        "longest_s": round(longest_s, 3),
    }
    say(done=said)
    sys.exit(0 if rows.min() == rows.max() == pushes else 1)


main()
