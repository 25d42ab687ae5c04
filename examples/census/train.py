"""Train Wide & Deep on census income: here alone, or as one trainer of a cluster.

    python -m examples.census.train --local
    backstay local --servers 3 -- python -m examples.census.train

The second form finds the servers in PADDLE_PSERVERS_IP_PORT_LIST. With PADDLE_TRAINERS_NUM
trainers, each takes every so-manieth example. ``demo.py`` starts servers and trainers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import paddle

from backstay.trainer import Client
from backstay.trainer import paddle as distributed
from backstay.trainer.checkpoints import CheckpointInfo
from examples.census.model import WideDeep
from examples.census.reader import load
from examples.common.counters import Counters
from examples.common.dataset import renumber
from examples.common.training import RunningScore, fit, print_report, score

JOB = "census"
PASSES = 16
BATCH_SIZE = 256
LEARNING_RATE = 1e-3
# The rate of each pass over that of the pass before.
DECAY = 0.87
STEPS_IN_FLIGHT = 4


def make_optimizer(
    model: WideDeep, examples: int
) -> tuple[paddle.optimizer.Adam, paddle.optimizer.lr.LRScheduler]:
    """Return Adam that touches only the rows of the batch, and its schedule, batch by batch."""
    decay_of_batch = DECAY ** (BATCH_SIZE / examples)
    scheduler = paddle.optimizer.lr.ExponentialDecay(LEARNING_RATE, gamma=decay_of_batch)
    optimizer = paddle.optimizer.Adam(scheduler, parameters=model.parameters(), lazy_mode=True)
    return optimizer, scheduler


def train_here(passes: int, seed: int) -> dict[str, float]:
    """Train in this process with plain Paddle; return AUC and logloss on the test split."""
    rows, (training, _, test) = renumber(*load())
    paddle.seed(seed)
    model = WideDeep(paddle.nn.Embedding, rows)
    optimizer, scheduler = make_optimizer(model, len(training))
    fit(
        model, [optimizer], training,
        passes=passes, batch_size=BATCH_SIZE, seed=seed, scheduler=scheduler,
    )  # fmt: skip
    return score(model, test)


class CheckpointPerPass:
    """Has the cluster write a checkpoint after each pass, while the next one goes on."""

    def __init__(self, client: Client) -> None:
        self.saved = 0
        self._client = client
        self._threads = ThreadPoolExecutor(1)
        self._saving: Future[CheckpointInfo] | None = None

    def begin(self, number: int) -> None:
        """Begin one, after the end of the one before."""
        self.finish()
        self._saving = self._threads.submit(self._client.checkpoints.save, tags={"pass": number})

    def finish(self) -> None:
        """Wait for the one under way; raises what it raised."""
        if self._saving is not None:
            self._saving.result()
            self.saved += 1
            self._saving = None


def train_on_cluster(passes: int, seed: int, *, checkpoints: bool) -> None:
    """Train this trainer's share of the examples, and report on the way.

    Counters are pushed along, so that ``demo.py`` can tell at the end whether a push was lost.
    """
    with distributed.init(job=JOB) as session:
        # One of the trainers asks for all.
        asks = checkpoints and session.trainer_id == 0
        keeper = CheckpointPerPass(session.client)

        training = load()[0][session.trainer_id :: session.trainers_num]
        paddle.seed(seed)
        model = WideDeep(distributed.Embedding, None)
        optimizer, scheduler = make_optimizer(model, len(training))
        updates = distributed.DistributedOptimizer(optimizer, steps_in_flight=STEPS_IN_FLIGHT)
        counters = Counters(session.client, session.trainer_id)

        def report(running: RunningScore) -> None:
            pushes = session.client.stats().pushes_acknowledged
            print_report(
                trainer=session.trainer_id,
                pushes_acknowledged=pushes,
                counted=counters.counted,
                acknowledgements=counters.take_acknowledgements(),
                checkpoints=keeper.saved,
                **running.summary(),
            )

        running = fit(
            model, [updates, counters], training,
            passes=passes, batch_size=BATCH_SIZE, seed=seed + session.trainer_id,
            scheduler=scheduler, prefetch=model.prefetch, report=report,
            pass_ended=keeper.begin if asks else None,
        )  # fmt: skip
        keeper.finish()
        updates.synchronize()
        counters.synchronize()
        report(running)


def score_on_cluster(endpoints: Sequence[str]) -> dict[str, float]:
    """Return AUC and logloss on the test split of the model that a cluster holds."""
    _, _, test = load()
    with (
        distributed.init(endpoints, trainer_id=0, trainers_num=1, job=JOB),
        # Parameters are found by the names that Paddle gives: those of a first model.
        paddle.utils.unique_name.guard(),
    ):
        model = WideDeep(distributed.Embedding, None)
        # Finds the tables that the trainers made, and loads the dense parameters.
        distributed.DistributedOptimizer(make_optimizer(model, len(test))[0])
        return score(model, test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--local", action="store_true", help="plain Paddle, without servers")
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", action="store_true", help="after each pass")
    arguments = parser.parse_args()
    if not arguments.local:
        train_on_cluster(arguments.passes, arguments.seed, checkpoints=arguments.checkpoints)
        return
    begin = time.perf_counter()
    scores = train_here(arguments.passes, arguments.seed)
    seconds = time.perf_counter() - begin
    print(f"test AUC {scores['auc']:.4f}, logloss {scores['logloss']:.4f}, {seconds:.0f} s")


if __name__ == "__main__":
    main()
