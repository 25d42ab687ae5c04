"""The commands, run as a user runs them: output, exit codes, signals."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from backstay.errors import ServerEndedError, ServerStartError
from backstay.exit_codes import ExitCode
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import TableSpec
from backstay.trainer.client import Client
from tests.processes import is_gone

Command = Callable[..., "subprocess.CompletedProcess[str]"]
StartServer = Callable[..., "subprocess.Popen[bytes]"]
Eventually = Callable[[Callable[[], bool]], None]

LOOPBACK = ("--listen-control", "127.0.0.1:0", "--listen-data", "127.0.0.1:0")
STOP_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    # One copy, so that the rows of the nodes add up to those of the table.
    with LocalCluster(servers=2, settings={"slot_count": 64, "replicas": 1}) as running:
        with Client(running.endpoints) as client:
            table = client.create_table(TableSpec.sparse("user/emb", 4))
            client.push(table, np.arange(100), np.ones((100, 4), dtype=np.float32))
            client.create_table(TableSpec.dense("bias", (3, 5)))
        yield running


def test_status_tells_the_nodes_and_their_figures(cluster: LocalCluster, command: Command) -> None:
    done = command("pserverctl", "--endpoint", cluster.endpoints[0], "status", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["healthy"] is True
    assert report["cluster"] == "local"
    assert report["slot_count"] == 64
    assert report["routing_version"] == 1
    assert [node["node_id"] for node in report["nodes"]] == ["ps-0", "ps-1"]
    assert [node["control_address"] for node in report["nodes"]] == cluster.endpoints
    assert sum(node["master_slots"] for node in report["nodes"]) == 64
    assert sum(node["rows"] for node in report["nodes"]) == 100
    for node in report["nodes"]:
        assert node["status"] == "serving"
        assert node["tables"] == 2
        assert node["stats"]["keys_pushed"] == node["rows"]
        assert node["error"] is None


def test_tables_are_summed_over_the_nodes(cluster: LocalCluster, command: Command) -> None:
    done = command("pserverctl", "tables", "--json", BACKSTAY_ENDPOINT=cluster.endpoints[1])
    assert done.returncode == 0, done.stderr
    bias, emb = json.loads(done.stdout)["tables"]
    assert (bias["name"], emb["name"]) == ("bias", "user/emb")
    assert (emb["rows"], emb["copies"]) == (100, 100)
    assert emb["bytes"] > 100 * 4 * 4
    assert emb["spec"]["kind"] == {"sparse": {"dim": 4}}


def test_a_row_and_its_copies_are_counted_apart(command: Command, eventually: Eventually) -> None:
    with LocalCluster(servers=2, settings={"slot_count": 16, "replicas": 2}) as running:
        with Client(running.endpoints) as client:
            table = client.create_table(TableSpec.sparse("emb", 4))
            client.push(table, np.arange(100), np.ones((100, 4), dtype=np.float32))

        def counted() -> bool:
            done = command("pserverctl", "tables", "--json", BACKSTAY_ENDPOINT=running.endpoints[0])
            (emb,) = json.loads(done.stdout)["tables"]
            # A row is at its master at once, at the backup with the next prepare.
            assert emb["rows"] == 100
            return bool(emb["copies"] == 200)

        eventually(counted)


def test_the_tables_for_people_name_the_same_things(
    cluster: LocalCluster, command: Command
) -> None:
    # Paddle's name for the addresses works as well.
    here = {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(cluster.endpoints), "COLUMNS": "40"}
    status = command("pserverctl", "status", **here)
    tables = command("pserverctl", "tables", **here)
    assert (status.returncode, tables.returncode) == (0, 0)
    data_addresses = [server.data_address for server in cluster.servers]
    for text in ("healthy", "ps-0", "ps-1", *cluster.endpoints, *data_addresses):
        assert text in status.stdout
    for text in ("user/emb", "sparse 4", "dense 3x5", "100"):
        assert text in tables.stdout


def test_every_node_of_a_cluster_that_is_ready_sees_all_of_them_serve(command: Command) -> None:
    with LocalCluster(servers=3) as cluster:
        done = command("pserverctl", "tables", BACKSTAY_ENDPOINT=cluster.endpoints[0])
        assert done.stdout == "no tables yet\n"
        for endpoint in cluster.endpoints:
            with Client(endpoint) as client:
                assert {node.status for node in client.cluster().nodes} == {"serving"}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("slot_count = 64", "slot_count: 64 here, but the store holds another cluster under"),
        ("replicas = 3", "replicas: 3 here, but the store holds another cluster"),
    ],
)
def test_a_node_that_does_not_fit_its_cluster_ends_with_2(
    tmp_path: Path, command: Command, setting: str, says: str
) -> None:
    with LocalCluster(servers=2, directory=tmp_path, settings={"slot_count": 1024}) as cluster:
        cluster.kill(1)
        name = setting.partition(" ")[0]
        lines = (tmp_path / "ps-1.toml").read_text().splitlines()
        changed = tmp_path / "changed.toml"
        kept = [line for line in lines if not line.startswith(f"{name} =")]
        changed.write_text("\n".join([*kept, setting]))
        done = command("pserver", "serve", "--config", str(changed))
        assert done.returncode == 2
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_json_of_a_cluster_that_does_not_answer_holds_the_error(command: Command) -> None:
    done = command("pserverctl", "--endpoint", "127.0.0.1:1", "status", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"].startswith("no pserver answers at 127.0.0.1:1 (conn")


def test_a_lost_node_makes_the_cluster_unhealthy(command: Command, eventually: Eventually) -> None:
    with LocalCluster(servers=2) as cluster:
        cluster.kill(1)
        endpoints = ",".join(reversed(cluster.endpoints))
        here = ("pserverctl", "--endpoint", endpoints)

        def is_told() -> bool:
            done = command(*here, "status", "--json")
            assert done.returncode == 1, done.stderr
            report = json.loads(done.stdout)
            return str(report["cluster_status"]) == "UNHEALTHY"

        eventually(is_told)
        report = json.loads(command(*here, "status", "--json").stdout)
        assert report["nodes"][0]["master_slots"] == 1024
        assert report["controller"] == "ps-0"
        assert "1 node for 2 copies" in report["reason"]
        assert "1 node for 2 copies" in command(*here, "status").stdout
        with pytest.raises(ServerEndedError, match=r"ps-1 at .* has ended with exit code -9"):
            cluster.check()
        # Waiting ends with the same answer when its time is over.
        assert command(*here, "status", "--wait", "1").returncode == 1
        assert command(*here, "slots", "--wait", "1", "--json").returncode == 1
        cluster.restart(1)
        assert command(*here, "slots", "--wait", "25", "--json").returncode == 0
        done = command(*here, "status", "--wait", "25")
        assert done.returncode == 0, done.stdout


def test_a_node_that_hangs_is_told_as_silent(command: Command) -> None:
    # The lease is long, so that the node counts as alive for the whole of the test.
    with LocalCluster(servers=2, settings={"lease_ttl_ms": 60_000}) as cluster:
        cluster.pause(1)
        here = ("pserverctl", "--endpoint", cluster.endpoints[0])
        quick = {"BACKSTAY_CONNECT_TIMEOUT_MS": "1000"}
        done = command(*here, "status", "--json", **quick)
        assert done.returncode == 1, done.stderr
        nodes = json.loads(done.stdout)["nodes"]
        assert [node["status"] for node in nodes] == ["serving", "unreachable"]
        assert cluster.endpoints[1] in nodes[1]["error"]
        done = command(*here, "tables", "--json", **quick)
        assert done.returncode == 1
        assert json.loads(done.stdout)["silent_nodes"] == ["ps-1"]
        cluster.kill(1)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (("status",), 2, "give --endpoint HOST:PORT or set BACKSTAY_ENDPOINT or PADDLE_PSERVERS"),
        (("--endpoint", "nonsense", "status"), 2, "'nonsense' is not of the form host:port"),
        (("--endpoint", "127.0.0.1:1", "status"), 3, "no pserver answers at 127.0.0.1:1"),
        (("--endpoint", "127.0.0.1:1,127.0.0.1:2", "tables"), 3, "127.0.0.1:2"),
        (("--config", "/nowhere.toml", "--endpoint", "127.0.0.1:1", "status"), 2, "/nowhere.toml"),
        (("states",), 2, "states"),
    ],
)
def test_pserverctl_says_what_is_wrong(
    command: Command, arguments: tuple[str, ...], exit_code: int, says: str
) -> None:
    done = command("pserverctl", *arguments)
    assert done.returncode == exit_code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--listen-control", "0.0.0.0:0"), "listen_control: '0.0.0.0:0' can be reached"),
        (("--listen-data", "10.0.0.1:0"), "listen_data: '10.0.0.1:0' can be reached"),
        (("--slot-count", "1000"), "slot_count: 1000 is not a power of two"),
        (("--store-members", "ps-1=127.0.0.1:7001"), "this node, 'ps-0', is not in the list"),
        (("--store", "etcd"), "store_endpoints: must name etcd's addresses"),
        (("--config", "/nowhere.toml"), "cannot read the file '/nowhere.toml'"),
    ],
)
def test_a_wrong_setting_ends_serve_with_2(
    command: Command, arguments: tuple[str, ...], says: str
) -> None:
    done = command("pserver", "serve", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("plane", ["control", "data"])
def test_a_port_in_use_ends_serve_with_its_code(command: Command, plane: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = command("pserver", "serve", *LOOPBACK, f"--listen-{plane}", address)
    assert done.returncode == ExitCode.CANNOT_LISTEN
    assert f"listen_{plane}: cannot listen on {address}" in done.stderr
    assert "in use" in done.stderr
    # One line of ours, and none of gRPC's own.
    assert [line for line in done.stderr.splitlines() if "tcp_" in line or "grpc" in line] == []
    assert "Traceback" not in done.stderr


def test_two_servers_on_one_port_do_not_share_it(cluster: LocalCluster, command: Command) -> None:
    # gRPC would let them, and each would get some of the calls.
    done = command("pserver", "serve", *LOOPBACK, "--listen-control", cluster.endpoints[0])
    assert done.returncode == ExitCode.CANNOT_LISTEN


def test_show_config_names_the_source_of_each_setting(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "backstay.toml"
    file.write_text('[server]\ncluster = "demo"\ntoken = "12345678"\n')
    done = command(
        *("pserver", "serve", "--config", str(file), "--slot-count", "64", "--show-config"),
        BACKSTAY_IO_THREADS="3",
    )
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert "slot_count = 64  [argument]" in lines
    assert f"cluster = demo  [file {file}]" in lines
    assert "io_threads = 3  [environment BACKSTAY_IO_THREADS]" in lines
    assert "node_id = ps-0  [default]" in lines
    assert f"token = (not shown)  [file {file}]" in lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_server_gracefully(
    tmp_path: Path, start_server: StartServer, eventually: Eventually, number: signal.Signals
) -> None:
    process = start_server(*LOOPBACK)
    log = tmp_path / "server-0.log"
    eventually(lambda: "master of 1024 of 1024 slots" in log.read_text())
    process.send_signal(number)
    assert process.wait(STOP_LIMIT_S) == 0
    assert "stopping" in log.read_text()


def test_what_was_acknowledged_before_a_stop_was_applied() -> None:
    cluster = LocalCluster(servers=1)
    cluster.start()
    try:
        with Client(cluster.endpoints) as client:
            table = client.create_table(TableSpec.sparse("emb", 4))
            client.push(table, np.arange(10), np.ones((10, 4), dtype=np.float32))
    finally:
        assert cluster.stop() == [0]


def test_local_runs_a_command_against_its_servers(command: Command) -> None:
    script = (
        "import json, os; from backstay.trainer.client import Client; "
        "client = Client(os.environ['PADDLE_PSERVERS_IP_PORT_LIST']); "
        "print(len(client.cluster().nodes), os.environ['BACKSTAY_ENDPOINT']); "
        "client.close(); raise SystemExit(7)"
    )
    done = command("backstay", "local", "-n", "2", "--", sys.executable, "-c", script)
    assert done.returncode == 7, done.stderr
    assert re.fullmatch(r"2 127\.0\.0\.1:\d+,127\.0\.0\.1:\d+\n", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (("-n", "1", "--", "/no/such/command"), 127, "cannot run '/no/such/command'"),
        (("-n", "1", "sh", "-c", "kill -TERM $$"), 128 + 15, ""),
        (("-n", "0", "true"), 2, "0 is not in the range"),
        (("-n", "1", "--slot-count", "3", "true"), 1, "slot_count: 3 is not a power of two"),
    ],
)
def test_the_exit_code_of_local(
    command: Command, arguments: tuple[str, ...], exit_code: int, says: str
) -> None:
    done = command("backstay", "local", *arguments)
    assert done.returncode == exit_code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_local_without_a_command_runs_until_it_is_told_to_stop(
    tmp_path: Path, plain_environment: dict[str, str], eventually: Eventually
) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "backstay.pserver.local_cli"),
            *("local", "-n", "2", "--log-dir", str(tmp_path)),
        ],
        env=plain_environment | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        pids = [int(line.split()[-1]) for line in lines[:2]]
        assert lines[2].startswith("export PADDLE_PSERVERS_IP_PORT_LIST=127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_LIMIT_S) == 0
    finally:
        process.kill()
        process.communicate()
    eventually(lambda: all(is_gone(pid) for pid in pids))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("ps-0.log", "ps-0.store", "ps-0.toml", "ps-1.log", "ps-1.toml"),
    ]
    assert (tmp_path / "ps-0.toml").stat().st_mode & 0o077 == 0


def test_servers_do_not_outlive_a_parent_that_was_killed(
    plain_environment: dict[str, str], eventually: Eventually
) -> None:
    script = (
        "import signal; from backstay.pserver.local_cluster import LocalCluster; "
        "cluster = LocalCluster(servers=2); cluster.start(); "
        "print(*cluster.pids, flush=True); signal.pause()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=plain_environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    process.kill()
    process.communicate()
    eventually(lambda: all(is_gone(pid) for pid in pids))


def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    cluster = LocalCluster(servers=2, directory=tmp_path, settings={"slot_count": 1000})
    with pytest.raises(ServerStartError) as failed:
        cluster.start()
    assert "did not start (exit code 2)" in str(failed.value)
    assert "slot_count: 1000 is not a power of two" in str(failed.value)
    assert cluster.servers == []


def test_help_has_examples(command: Command) -> None:
    for arguments in (("pserver", "serve"), ("pserverctl", "status"), ("backstay", "local")):
        done = command(*arguments, "--help")
        assert done.returncode == 0
        assert "Examples:" in done.stdout
        assert "Exit codes:" in done.stdout


def test_verify_compares_the_replicas_of_every_slot(
    cluster: LocalCluster, command: Command
) -> None:
    alone = command("pserverctl", "--endpoint", cluster.endpoints[0], "verify")
    assert alone.stdout == "0 slots have equal copies, 64 only one copy\n"
    settings = {"slot_count": 64, "replicas": 2}
    with LocalCluster(servers=2, settings=settings) as two:
        with Client(two.endpoints) as client:
            table = client.create_table(TableSpec.sparse("emb", 4))
            client.push(table, np.arange(100), np.ones((100, 4), dtype=np.float32))
        done = command("pserverctl", "--endpoint", two.endpoints[0], "verify", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["good"] is True
    assert (report["equal"], report["single"], report["different"]) == (64, 0, [])
