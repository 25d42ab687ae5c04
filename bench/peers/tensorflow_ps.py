"""TensorFlow's ParameterServerStrategy on the benchmark's embedding job.

Runs in an environment of its own that has ``tensorflow-cpu``; it imports nothing of backstay.
Started without ``--role`` it starts the servers, the workers and the coordinator, one process
each, on loopback, and prints one line of JSON: keys/s over the timed steps.

A step, on a worker: dedupe the batch, look the rows up on the server, the gradient of the mean
square of (row - 1), and a scatter_sub on the server (plain SGD). The coordinator schedules steps
ahead, so the coordinator's own work is overlapped; batches are drawn before the clock starts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

FIELDS = 26
BATCHES = 8
LEARNING_RATE = 0.1
RUN_DEADLINE_S = 240.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--batch", type=int, default=2048, help="examples a step, of 26 keys each")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--skew", type=float, default=0.0, help="Zipf exponent; 0 is uniform")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--role", default="launch", help="launch, chief:0, ps:N or worker:N")
    return parser.parse_args()


def free_addresses(count: int) -> list[str]:
    """Addresses that are free now; all are held until all are known, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{held.getsockname()[1]}" for held in sockets]
    finally:
        for held in sockets:
            held.close()


def launch(arguments: argparse.Namespace) -> None:
    addresses = free_addresses(arguments.servers + arguments.trainers + 1)
    cluster = {
        "ps": addresses[: arguments.servers],
        "worker": addresses[arguments.servers : -1],
        "chief": addresses[-1:],
    }

    def start(role: str, number: int) -> subprocess.Popen[bytes]:
        task = {"cluster": cluster, "task": {"type": role, "index": number}}
        environment = {"TF_CONFIG": json.dumps(task), "TF_CPP_MIN_LOG_LEVEL": "3"}
        is_chief = role == "chief"
        return subprocess.Popen(
            [sys.executable, *sys.argv, "--role", f"{role}:{number}"],
            env={**os.environ, **environment},
            stdout=None if is_chief else subprocess.DEVNULL,
            stderr=None if is_chief else subprocess.DEVNULL,
        )

    others = [start(role, n) for role in ("ps", "worker") for n in range(len(cluster[role]))]
    try:
        chief = start("chief", 0)
        others.append(chief)
        code = chief.wait(timeout=RUN_DEADLINE_S)
    finally:
        for process in others:
            process.kill()
            process.wait()
    if code != 0:
        raise RuntimeError(f"TensorFlow's coordinator ended with exit code {code}")


def draw_batches(arguments: argparse.Namespace) -> Any:
    """Keys as int64 [BATCHES, keys a step]."""
    numpy: Any = importlib.import_module("numpy")
    generator = numpy.random.default_rng(0)
    shape = (BATCHES, arguments.batch * FIELDS)
    if arguments.skew:
        return (generator.zipf(arguments.skew, shape) % arguments.keys).astype("int64")
    return generator.integers(0, arguments.keys, shape, dtype="int64")


def train(tf: Any, resolver: Any, arguments: argparse.Namespace) -> float:
    """Return the seconds of the timed steps."""
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(arguments.servers)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table = tf.Variable(tf.random.uniform([arguments.keys, arguments.dim]), name="embedding")
    shards = table.variables if hasattr(table, "variables") else [table]
    batches = draw_batches(arguments)

    def dataset() -> Any:
        return tf.data.Dataset.from_tensor_slices(batches).repeat().prefetch(4)

    feed = iter(coordinator.create_per_worker_dataset(tf.function(dataset)))

    def replica_step(keys: Any) -> Any:
        unique, number_of_key = tf.unique(keys)
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, unique)
            tape.watch(rows)
            loss = tf.reduce_mean(tf.square(tf.gather(rows, number_of_key) - 1.0))
        gradient = tf.convert_to_tensor(tape.gradient(loss, rows))
        for shard in shards:
            shard.scatter_sub(tf.IndexedSlices(LEARNING_RATE * gradient, unique))
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step(iterator: Any) -> Any:
        return strategy.run(replica_step, args=(next(iterator),))

    for _ in range(arguments.warmup):
        coordinator.schedule(step, args=(feed,))
    coordinator.join()
    begun = time.perf_counter()
    for _ in range(arguments.steps):
        coordinator.schedule(step, args=(feed,))
    coordinator.join()
    return time.perf_counter() - begun


def main() -> None:
    arguments = parse_arguments()
    if arguments.servers != 1:
        # scatter_sub goes to every shard with the keys of the whole table: right for one only.
        raise SystemExit("this job is written for one TensorFlow server")
    if arguments.role == "launch":
        launch(arguments)
        return
    tf: Any = importlib.import_module("tensorflow")
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    role, number = arguments.role.split(":")
    if role != "chief":
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=role, task_index=int(number), protocol="grpc"
        )
        server.join()
        return
    seconds = train(tf, resolver, arguments)
    keys_per_s = arguments.steps * arguments.batch * FIELDS / seconds
    print(json.dumps({"keys_per_s": keys_per_s, "mean_keys_per_s": keys_per_s}), flush=True)
    os._exit(0)  # the coordinator's threads do not end when asked to


if __name__ == "__main__":
    main()
