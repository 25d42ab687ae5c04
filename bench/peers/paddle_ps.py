"""Paddle 2.6.2's own parameter server (brpc) on the benchmark's embedding job.

Paddle's wheels after 3.0 hold no parameter server, so this runs in an environment of its own:
``paddlepaddle==2.6.2 "numpy<2" protobuf==3.20.3 setuptools``. It imports nothing of backstay.

Started without ``--role`` it starts the servers and trainers, one process each, on loopback, and
prints one line of JSON: the keys/s of all trainers together over the timed steps.

A step runs the static program: Paddle dedupes the batch, pulls its rows, computes the mean square
of (row - 1) and hands the gradients to its communicator. **The mode is asynchronous: the trainer
goes on when the gradients are queued, and a background thread merges and sends them**, where the
other contestants wait until the server has applied them. That favours Paddle. (Its synchronous and
geo modes fail on a job that has only an embedding.)

With ``--accessor ctr`` the rows are those of its CtrCommonAccessor, which keeps shows, clicks and
the days since a row was last seen. Each key is told with a show, each fourth with a click.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

FIELDS = 26
BATCHES = 8
LEARNING_RATE = 0.1
PORT_DEADLINE_S = 60.0
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
    parser.add_argument("--accessor", choices=("sparse", "ctr"), default="sparse")
    parser.add_argument("--role", choices=("launch", "server", "trainer"), default="launch")
    return parser.parse_args()


def free_ports(count: int) -> list[int]:
    """Ports that are free now; all are held until all are known, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()


def wait_until_listening(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PORT_DEADLINE_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"Paddle's server ended with exit code {server.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)  # nothing tells when brpc listens: ask again
    raise RuntimeError(f"Paddle's server does not listen on port {port} after {PORT_DEADLINE_S} s")


def start(role: str, environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *sys.argv, "--role", role],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE if role == "trainer" else log,
        stderr=log,
    )


def launch(arguments: argparse.Namespace) -> None:
    ports = free_ports(arguments.servers + arguments.trainers)
    server_ports, trainer_ports = ports[: arguments.servers], ports[arguments.servers :]
    shared = {
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(f"127.0.0.1:{port}" for port in server_ports),
        "PADDLE_TRAINERS_NUM": str(arguments.trainers),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(f"127.0.0.1:{port}" for port in trainer_ports),
        "POD_IP": "127.0.0.1",
        "GLOG_v": "0",
        "GLOG_minloglevel": "2",
    }
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="bench-paddle-") as folder:
        logs = Path(folder) / "log"
        with logs.open("wb") as log:
            try:
                for port in server_ports:
                    role = {"TRAINING_ROLE": "PSERVER", "PADDLE_PORT": str(port)}
                    processes.append(start("server", {**shared, **role}, log))
                for port, server in zip(server_ports, processes):  # noqa: B905 - no strict in 3.9
                    wait_until_listening(port, server)
                trainers = []
                for number, port in enumerate(trainer_ports):
                    role = {
                        "TRAINING_ROLE": "TRAINER",
                        "PADDLE_TRAINER_ID": str(number),
                        "PADDLE_PORT": str(port),
                    }
                    trainers.append(start("trainer", {**shared, **role}, log))
                processes += trainers
                results = [read_result(trainer) for trainer in trainers]
            except BaseException:
                log.flush()
                sys.stderr.write(logs.read_text(errors="replace")[-4000:])
                raise
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
    total = sum(result["mean_keys_per_s"] for result in results)
    print(json.dumps({"keys_per_s": total, "mean_keys_per_s": total}))


def read_result(trainer: subprocess.Popen[bytes]) -> dict[str, float]:
    output, _ = trainer.communicate(timeout=RUN_DEADLINE_S)
    lines = [line for line in output.decode().splitlines() if line.startswith("{")]
    if trainer.returncode != 0 or not lines:
        raise RuntimeError(f"a Paddle trainer ended with exit code {trainer.returncode}")
    result: dict[str, float] = json.loads(lines[-1])
    return result


def build_job(paddle: Any, fleet: Any, arguments: argparse.Namespace) -> Any:
    """Declare the embedding and its loss; return the loss."""
    keys = paddle.static.data("keys", [None, 1], "int64")
    # Formatting the strategy fails with this protobuf, and minimize() formats it for its log.
    fleet.DistributedStrategy.__repr__ = lambda _: "DistributedStrategy"
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    if arguments.accessor == "ctr":
        rows = rows_with_shows_and_clicks(paddle, keys, arguments, strategy)
    else:
        rows = paddle.static.nn.sparse_embedding(
            keys,
            size=[arguments.keys, arguments.dim],
            param_attr=paddle.ParamAttr(name="embedding"),
        )
    loss = paddle.mean(paddle.square(paddle.reshape(rows, [-1, arguments.dim]) - 1.0))
    fleet.distributed_optimizer(paddle.optimizer.SGD(LEARNING_RATE), strategy).minimize(loss)
    return loss


def rows_with_shows_and_clicks(
    paddle: Any, keys: Any, arguments: argparse.Namespace, strategy: Any
) -> Any:
    """Declare an embedding of the CtrCommonAccessor: its rows begin with shows and clicks."""
    distributed: Any = importlib.import_module("paddle.distributed")
    show = paddle.static.data("show", [None, 1], "float32")
    click = paddle.static.data("click", [None, 1], "float32")
    rows = paddle.static.nn.sparse_embedding(
        keys,
        size=[arguments.keys, arguments.dim + 2],
        param_attr=paddle.ParamAttr(name="embedding"),
        entry=distributed.ShowClickEntry("show", "click"),
    )
    accessor = "table_parameters.embedding.accessor"
    strategy.sparse_table_configs = {
        "embedding": {
            f"{accessor}.accessor_class": "CtrCommonAccessor",
            # Its default is Adam, whatever the optimizer.
            f"{accessor}.embed_sgd_param.name": "SparseNaiveSGDRule",
            f"{accessor}.embedx_sgd_param.name": "SparseNaiveSGDRule",
        }
    }
    rows = paddle.reshape(rows, [-1, arguments.dim + 2])
    # Takes shows and clicks off, and gives the push its two columns for them.
    return paddle.static.nn.continuous_value_model(
        rows, paddle.concat([show, click], axis=1), use_cvm=False
    )


def draw_batches(arguments: argparse.Namespace, seed: int) -> list[Any]:
    numpy: Any = importlib.import_module("numpy")
    generator = numpy.random.default_rng(seed)
    count = arguments.batch * FIELDS
    batches = []
    for _ in range(BATCHES):
        if arguments.skew:
            keys = generator.zipf(arguments.skew, count) % arguments.keys
        else:
            keys = generator.integers(0, arguments.keys, count)
        batches.append(keys.reshape(-1, 1).astype("int64"))
    return batches


def train(paddle: Any, fleet: Any, loss: Any, arguments: argparse.Namespace) -> dict[str, float]:
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    program = paddle.static.default_main_program()
    feeds = [{"keys": batch} for batch in draw_batches(arguments, fleet.worker_index())]
    if arguments.accessor == "ctr":
        numpy: Any = importlib.import_module("numpy")
        show = numpy.ones((arguments.batch * FIELDS, 1), "float32")
        click = (numpy.arange(len(show)) % 4 == 0).astype("float32").reshape(-1, 1)
        for feed in feeds:
            feed.update(show=show, click=click)

    def step(number: int) -> None:
        executor.run(program, feed=feeds[number % BATCHES], fetch_list=[loss])

    for number in range(arguments.warmup):
        step(number)
    begun = time.perf_counter()
    for number in range(arguments.steps):
        step(number)
    seconds = time.perf_counter() - begun
    return {"mean_keys_per_s": arguments.steps * arguments.batch * FIELDS / seconds}


def serve_or_train(arguments: argparse.Namespace) -> None:
    # Paddle prints to descriptor 1 from C++: keep the real one for the result.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    paddle: Any = importlib.import_module("paddle")
    fleet: Any = importlib.import_module("paddle.distributed.fleet")
    paddle.enable_static()
    fleet.init(is_collective=False)
    loss = build_job(paddle, fleet, arguments)
    if arguments.role == "server":
        fleet.init_server()
        fleet.run_server()
        return
    results.write(json.dumps(train(paddle, fleet, loss, arguments)) + "\n")
    results.close()
    fleet.stop_worker()


def main() -> None:
    arguments = parse_arguments()
    if arguments.role == "launch":
        launch(arguments)
    else:
        serve_or_train(arguments)


if __name__ == "__main__":
    main()
