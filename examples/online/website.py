"""Shows ads, predicts whether they are clicked, and writes to a topic what came of it.

    python -m examples.online.website --broker 127.0.0.1:9092 --export FOLDER

The predictions are those of a model that is followed: what a job learns from the topic is in them
seconds later. Each is made before its click is written, so nothing can have learned from it.

Lines on standard input tell it what to do: ``open`` has the visits begin; from ``freeze`` on the
same visits are also predicted by the model as it was then; ``stop``, or the end of the input, ends
it when all clicks are in the topic.

A line of JSON each second tells how it goes, and a last one what came of it. May import
the model, the world and what serving needs.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from confluent_kafka import Producer
from numpy.typing import NDArray

from backstay.errors import CheckpointNotFound, InvalidRequest
from backstay.job.metrics import auc
from backstay.serving import Follower
from backstay.trainer.paddle.inference import load_for_inference
from examples.online.model import FIELDS, ids_of
from examples.online.world import Visits, World

MODEL = Path(__file__).with_name("model.py")
TICK_S = 0.05
TELL_S = 1.0
# One that is later than this does not try to make up for it.
LATE_S = 1.0
PROBE_LOOK_S = 0.002
RETRY_S = 0.5
FLUSH_S = 60.0


class Judged:
    """What the models said of visits, and how well: in windows of so many visits."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._open: list[tuple[NDArray[Any], ...]] = []
        self._visits = 0
        self.windows: list[dict[str, float]] = []

    def add(self, click: NDArray[Any], **scores: NDArray[Any]) -> None:
        """Take visits with the scores of each model."""
        self._open.append((click, *scores.values()))
        self._visits += len(click)
        if self._visits < self._window:
            return
        clicks, *columns = (np.concatenate(one) for one in zip(*self._open, strict=True))
        self.windows.append(
            {name: auc(clicks, one) for name, one in zip(scores, columns, strict=True)}
        )
        self._open, self._visits = [], 0

    def newest(self) -> dict[str, float]:
        """Return the AUCs of the last window; empty: there is none."""
        return self.windows[-1] if self.windows else {}

    def mean(self) -> dict[str, float]:
        """Return the mean of each AUC over all windows."""
        return {name: float(np.mean([one[name] for one in self.windows])) for name in self.newest()}


class Models:
    """The model that is followed, and the one that is not any more; they come one by one."""

    def __init__(self, export: str, probe: str) -> None:
        self._export = export
        self._probe = probe
        self._stop = threading.Event()
        self.followed: Any = None
        self.frozen: Any = None
        self.trouble = ""
        # Values of the probe's only row, each with when it was seen first.
        self.seen: list[tuple[int, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def freeze(self) -> None:
        """Keep the model as it is now."""
        frozen = self._load()
        if frozen is not None:
            frozen.follower.close()
            self.frozen = frozen

    def scores(self, visits: Visits) -> dict[str, NDArray[Any]]:
        """Return what each model that is there says of visits."""
        ids = paddle.to_tensor(ids_of(lambda name: getattr(visits, name)))
        models = {"follower": self.followed, "frozen": self.frozen}
        with paddle.no_grad():
            return {name: one(ids).numpy() for name, one in models.items() if one is not None}

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        if self.followed is not None:
            self.followed.follower.close()

    def _load(self) -> Any:
        while not self._stop.is_set():
            try:
                model = load_for_inference(MODEL, self._export, follow=True)
            except (CheckpointNotFound, InvalidRequest) as error:
                # The job has not begun, or its workers have not made the tables yet.
                self.trouble = str(error)
                self._stop.wait(RETRY_S)
                continue
            self.trouble = ""
            return model
        return None

    def _run(self) -> None:
        """Wait for the model, then look at the probe."""
        self.followed = self._load()
        if self.followed is not None and self._probe:
            self._watch(self.followed.follower)

    def _watch(self, follower: Follower) -> None:
        probe, key, newest = follower.table(self._probe), np.zeros(1, np.uint64), 0
        while not self._stop.wait(PROBE_LOOK_S):
            value = int(probe.lookup(key)[0, 0])
            if value > newest:
                self.seen.append((value, time.monotonic()))
                newest = value


class Topic:
    """Where clicks go. What a broker that is away does not take waits here."""

    def __init__(self, broker: str, name: str) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": broker,
                # Otherwise what is sent again after an outage may be there twice.
                "enable.idempotence": True,
                "linger.ms": 20,
                # That a broker is away is no news here.
                "log_level": 0,
            }
        )
        self._name = name
        self.acknowledged = 0
        self.failed = ""

    def write(self, visits: Visits) -> None:
        columns = [getattr(visits, name).tolist() for name in (*FIELDS, "click")]
        for values in zip(*columns, strict=True):
            record = json.dumps(dict(zip((*FIELDS, "click"), values, strict=True)))
            while True:
                try:
                    self._producer.produce(self._name, record, on_delivery=self._delivered)
                    break
                except BufferError:
                    # The broker has been away for long.
                    self._producer.poll(0.1)
        self._producer.poll(0)

    def flush(self) -> None:
        left = self._producer.flush(FLUSH_S)
        if left:
            self.failed = f"{left} clicks are not in the topic after {FLUSH_S:g} s"

    def _delivered(self, error: object, _: object) -> None:
        if error is None:
            self.acknowledged += 1
        else:
            self.failed = str(error)


def follow_orders(models: Models, is_open: threading.Event, stop: threading.Event) -> None:
    """Do what standard input says."""
    for line in sys.stdin:
        if line.strip() == "open":
            is_open.set()
        elif line.strip() == "freeze":
            models.freeze()
        elif line.strip() == "stop":
            break
    stop.set()
    is_open.set()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Have visits until told to stop; return the last line."""
    world, topic = World(arguments.seed), Topic(arguments.broker, arguments.topic)
    models, judged = Models(arguments.export, arguments.probe), Judged(arguments.window)
    is_open, stop = threading.Event(), threading.Event()
    threading.Thread(target=follow_orders, args=(models, is_open, stop), daemon=True).start()
    is_open.wait()
    each, written, frozen_at, now_s = max(1, round(arguments.rate * TICK_S)), 0, 0, 0.0
    due_s = told_s = time.monotonic()
    while not stop.wait(max(0.0, due_s - time.monotonic())):
        visits = world.visits(each, now_s)
        scores = models.scores(visits)
        if "frozen" in scores:
            frozen_at = frozen_at or written
            judged.add(visits.click, **scores, best=visits.chance)
        topic.write(visits)
        written, now_s = written + each, now_s + TICK_S
        due_s = max(due_s + TICK_S, time.monotonic() - LATE_S)
        if time.monotonic() - told_s >= TELL_S:
            told_s = time.monotonic()
            found = {"models": list(scores), "trouble": models.trouble}
            tell({"written": written, **found, "auc": judged.newest()})
    topic.flush()
    models.close()
    return {
        "written": written,
        "acknowledged": topic.acknowledged,
        "failed": topic.failed,
        "frozen_at": frozen_at,
        "windows": len(judged.windows),
        "auc": judged.mean(),
        "ids": world.born,
        "seen": models.seen,
    }


def tell(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--broker", required=True, help="HOST:PORT of Kafka")
    parser.add_argument("--topic", default="clicks")
    parser.add_argument("--export", required=True, help="folder or URL of the job's export")
    parser.add_argument("--probe", default="", help="a table to tell when its values were seen")
    parser.add_argument("--rate", type=float, default=2000.0, help="visits a second")
    parser.add_argument("--window", type=int, default=10_000, help="visits that an AUC is of")
    parser.add_argument("--seed", type=int, default=0)
    tell(run(parser.parse_args()))


if __name__ == "__main__":
    main()
