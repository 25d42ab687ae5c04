"""A coordinated cluster of real processes: it forms, loses nodes, and takes them back."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backstay import rpc
from backstay._proto.v1 import cluster_pb2, cluster_pb2_grpc
from backstay.config import SecurityConfig
from backstay.consensus.records import RoutingTable
from backstay.consensus.records.messages import routing_from_message
from backstay.errors import BackstayError
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import TableSpec
from backstay.trainer import Client
from tests.etcd import EtcdCluster
from tests.waiting import LIMIT_S, wait_until

Eventually = Callable[[Callable[[], bool]], None]
Command = Callable[..., Any]
StartServer = Callable[..., Any]
# The aim is a second; a machine that runs other tests beside this one is given more.
FAILOVER_LIMIT_S = 3.0
LEASE_TTL_MS = 2000
LOOPBACK = ("--listen-control", "127.0.0.1:0", "--listen-data", "127.0.0.1:0")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path) as running:
        yield running


@pytest.fixture
def on_etcd(etcd: EtcdCluster) -> dict[str, object]:
    return {"store": "etcd", "store_endpoints": list(etcd.endpoints), "lease_ttl_ms": LEASE_TTL_MS}


def ask(address: str) -> cluster_pb2.GetClusterResponse:
    with rpc.open_channel(address, SecurityConfig()) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        with rpc.mapped_errors(address):
            return stub.GetCluster(cluster_pb2.GetClusterRequest(), timeout=30)


def routing_at(address: str) -> RoutingTable:
    return routing_from_message(ask(address))


def routing_without(node_id: str, address: str) -> RoutingTable | None:
    """Return what a node routes by, None while the other node is in it."""
    routing = routing_at(address)
    return None if node_id in {node.node_id for node in routing.nodes} else routing


def record(etcd: EtcdCluster, name: str) -> Any:
    """A record as plain etcdctl shows it."""
    return json.loads(etcd.etcdctl("get", "--print-value-only", f"/local/{name}"))


def names_below(etcd: EtcdCluster, prefix: str) -> list[str]:
    text = etcd.etcdctl("get", "--prefix", "--keys-only", f"/local/{prefix}")
    return [line.removeprefix("/local/") for line in text.split() if line]


def test_the_records_are_what_the_design_says(
    etcd: EtcdCluster, on_etcd: dict[str, object], eventually: Eventually
) -> None:
    with LocalCluster(servers=2, settings={**on_etcd, "slot_count": 4}) as cluster:
        config = record(etcd, "config")
        assert len(config.pop("cluster_uid")) == 32
        assert config == {
            "format": 1,
            "cluster": "local",
            "slot_count": 4,
            "replicas": 2,
            "initial_nodes": 2,
        }
        member = record(etcd, "pservers/ps-0")
        assert list(member) == [
            *("id", "instance", "incarnation", "status", "node_status"),
            *("start_time", "sync"),
            *("data_address", "control_address", "host", "lease", "version"),
            "keeps_store",
        ]
        assert member["id"] == "ps-0"
        assert member["incarnation"] == 1
        assert member["status"] == "up"
        assert member["node_status"] == "serving"
        assert member["start_time"] == pytest.approx(time.time(), abs=60)
        assert member["sync"] is True
        assert member["control_address"] == cluster.endpoints[0]
        assert member["data_address"] == cluster.servers[0].data_address
        routing = record(etcd, "routing")
        assert list(routing) == [
            *("format", "version", "generation", "replicas", "slot_count", "nodes", "gone"),
            *("sets", "set_of_slot", "term_of_slot", "epoch_of_slot", "restoring", "lost"),
        ]
        assert routing["restoring"] == {"url": "", "checkpoint": "", "slots": []}
        assert routing["nodes"][0] == {
            "node_id": "ps-0",
            **{name: member[name] for name in ("instance", "control_address", "data_address")},
            "host": member["host"],
        }
        assert sorted(routing["sets"]) == [[0, [1], []], [1, [0], []]]
        assert record(etcd, "controller")["id"] in ("ps-0", "ps-1")
        eventually(lambda: len(names_below(etcd, "pshards/")) == 8)
        shards = sorted(names_below(etcd, "pshards/"))
        assert shards == [f"pshards/{slot}/{copy}" for slot in range(4) for copy in range(2)]
        shard = record(etcd, "pshards/1/0")
        assert list(shard) == [
            *("id", "shardid", "node", "instance", "created", "modified", "status"),
            "routing_version",
        ]
        assert (shard["id"], shard["shardid"], shard["status"]) == (0, 1, "master")
        assert shard["created"] == shard["modified"] == pytest.approx(time.time(), abs=60)
        status = record(etcd, "pserver_cluster_status")
        assert status == {"cluster_status": "OK", "reason": "", "nodes": ["ps-0", "ps-1"]}
        (event,) = names_below(etcd, "events/")
        assert record(etcd, event)["kind"] == "created"


def replicas_in(etcd: EtcdCluster) -> dict[tuple[int, str], dict[str, Any]]:
    """Return the readable view by slot and node; one node never has two of a slot's replicas."""
    shards = [record(etcd, name) for name in names_below(etcd, "pshards/")]
    return {(one["shardid"], one["node"]): one for one in shards}


def test_replicas_keep_their_numbers_and_times_when_the_controller_changes(
    etcd: EtcdCluster, on_etcd: dict[str, object], eventually: Eventually
) -> None:
    with LocalCluster(servers=3, settings={**on_etcd, "slot_count": 16}) as cluster:
        eventually(lambda: len(names_below(etcd, "pshards/")) == 32)
        before = replicas_in(etcd)
        # What an earlier version wrote is cleared away by the next controller.
        etcd.etcdctl("put", "/local/pshards/0/ps-0", '{"id":"0/ps-0"}')
        victim = record(etcd, "controller")["id"]
        cluster.kill(int(victim.removeprefix("ps-")))

        def is_whole() -> bool:
            if "pshards/0/ps-0" in names_below(etcd, "pshards/"):
                return False
            shards = replicas_in(etcd).values()
            whole = [one for one in shards if one["node"] != victim]
            return len(whole) == len(shards) == 32 and all(
                one["status"] != "catching_up" for one in whole
            )

        eventually(is_whole)
        assert sorted(names_below(etcd, "pshards/")) == sorted(
            f"pshards/{slot}/{copy}" for slot in range(16) for copy in range(2)
        )
        changed = replicas_in(etcd)
        stayed = before.keys() & changed.keys()
        assert len(stayed) == 32 - sum(node == victim for _, node in before)
        for key in stayed:
            assert changed[key]["created"] == before[key]["created"]
            if changed[key]["status"] != before[key]["status"]:
                assert changed[key]["modified"] > before[key]["modified"]
        newest = max(one["created"] for one in before.values())
        assert all(changed[key]["created"] > newest for key in changed.keys() - stayed)


def test_a_repair_leaves_a_record_whoever_is_the_controller(
    etcd: EtcdCluster, on_etcd: dict[str, object], eventually: Eventually, command: Command
) -> None:
    with LocalCluster(servers=4, settings={**on_etcd, "slot_count": 16}) as cluster:
        with Client(cluster.endpoints) as client:
            table = client.create_table(TableSpec.sparse("emb", dim=16))
            client.push(table, np.arange(4096), np.ones((4096, 16), np.float32))
        assert names_below(etcd, "plans/repair/") == []
        # The controller and another one: its successor takes the repair up.
        first = record(etcd, "controller")["id"]
        other = next(f"ps-{index}" for index in range(4) if f"ps-{index}" != first)
        for victim in (first, other):
            cluster.kill(int(victim.removeprefix("ps-")))
            survivor = next(one for one in cluster.servers if one.is_running).control_address

            def is_repaired(gone: str = victim) -> bool:
                repairs = [record(etcd, name) for name in names_below(etcd, "plans/repair/")]
                lost = {lost["node_id"] for one in repairs for lost in one["lost"]}
                return gone in lost and repairs[-1]["state"] == "done"

            eventually(is_repaired)
        newest = record(etcd, max(names_below(etcd, "plans/repair/")))
        assert newest["copies_left"] == newest["bytes_left"] == newest["slots_lost"] == 0
        assert newest["copies_total"] > 0
        assert newest["begun"] < newest["ended"] < time.time() + 1
        assert {newest["begun_by"], newest["ended_by"]} <= {f"ps-{n}" for n in range(4)} - {first}
        shown = command("pserverctl", "--endpoint", survivor, "plan")
        assert shown.stdout.startswith("nothing was ever planned\nrepair ")
        assert f"{newest['copies_total']} of {newest['copies_total']} copies" in shown.stdout
        told = command("pserverctl", "--endpoint", survivor, "plan", "--json")
        assert json.loads(told.stdout)["repairs"][-1]["id"] == newest["id"]


@pytest.mark.parametrize("store", ["etcd", "embedded"])
def test_a_killed_node_is_replaced_within_a_second(
    store: str, request: pytest.FixtureRequest
) -> None:
    settings = request.getfixturevalue("on_etcd") if store == "etcd" else {}
    with LocalCluster(servers=3, settings={**settings, "replicas": 3}) as cluster:
        before = ask(cluster.endpoints[0])
        controller = int(before.controller.removeprefix("ps-"))
        # The controller, too, which with the embedded store may be the leader as well.
        for victim in (next(index for index in range(3) if index != controller), controller):
            survivor = next(index for index in range(3) if index != victim)
            cluster.kill(victim)
            routing = wait_until(
                partial(routing_without, f"ps-{victim}", cluster.endpoints[survivor]),
                f"a routing without ps-{victim}",
                limit_s=FAILOVER_LIMIT_S,
            )
            assert (routing.master_of_slot >= 0).all()
            assert routing.generation == 0
            cluster.restart(victim)


def test_a_node_that_comes_back_is_another_process(
    etcd: EtcdCluster, on_etcd: dict[str, object], eventually: Eventually
) -> None:
    with LocalCluster(servers=2, settings=on_etcd) as cluster:
        before = record(etcd, "pservers/ps-1")
        cluster.kill(1)
        cluster.restart(1)
        after = record(etcd, "pservers/ps-1")
        assert after["incarnation"] == 2
        assert after["instance"] != before["instance"]
        death = record(etcd, f"gone/{before['instance']}")
        assert (death["id"], death["instance"]) == ("ps-1", before["instance"])

        def is_used_again() -> bool:
            routing = record(etcd, "routing")
            listed = {node["instance"] for node in routing["nodes"]}
            return after["instance"] in listed and before["instance"] not in listed

        eventually(is_used_again)


def test_two_living_processes_cannot_have_one_id(
    command: Command, etcd: EtcdCluster, on_etcd: dict[str, object]
) -> None:
    with LocalCluster(servers=1, settings=on_etcd) as cluster:
        done = command(
            *("pserver", "serve", *LOOPBACK, "--cluster", "local", "--node-id", "ps-0"),
            *("--store", "etcd", "--store-endpoints", etcd.endpoints[0]),
        )
        assert done.returncode == 2
        assert "node_id: 'ps-0' is taken in cluster 'local' by a living process" in done.stderr
        assert cluster.endpoints[0] in done.stderr
        assert "Traceback" not in done.stderr
        cluster.check()
        assert (routing_at(cluster.endpoints[0]).master_of_slot == 0).all()


def test_something_else_under_the_clusters_name_is_left_alone(
    command: Command, etcd: EtcdCluster
) -> None:
    here = (
        *("pserver", "serve", *LOOPBACK, "--cluster", "local"),
        *("--store", "etcd", "--store-endpoints", etcd.endpoints[0]),
    )
    etcd.etcdctl("put", "/local/of-another-program", "1")
    done = command(*here)
    assert done.returncode == 2
    assert "'/local/of-another-program' but no config record" in done.stderr
    etcd.etcdctl("put", "/local/config", '{"format":2}')
    done = command(*here)
    assert done.returncode == 2
    assert "'/local/config' that this version cannot read" in done.stderr


def test_a_node_waits_for_a_store_that_is_not_there(
    tmp_path: Path, etcd: EtcdCluster, start_server: StartServer, eventually: Eventually
) -> None:
    etcd.kill()
    process = start_server(
        *(*LOOPBACK, "--cluster", "local", "--store", "etcd"),
        *("--store-endpoints", etcd.endpoints[0], "--store-deadline-ms", "500"),
    )
    log = tmp_path / "server-0.log"
    eventually(lambda: "waiting for the coordination store: " in log.read_text())
    assert etcd.endpoints[0] in log.read_text()
    etcd.start()
    eventually(lambda: "master of 1024 of 1024 slots" in log.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0


def test_nodes_serve_on_while_the_store_is_away(
    etcd: EtcdCluster, on_etcd: dict[str, object], eventually: Eventually
) -> None:
    with LocalCluster(servers=2, settings={**on_etcd, "store_deadline_ms": 500}) as cluster:
        before = routing_at(cluster.endpoints[0])
        etcd.kill()
        eventually(
            lambda: "store has not answered since" in ask(cluster.endpoints[0]).health_reason
        )
        answer = ask(cluster.endpoints[1])
        assert routing_from_message(answer).version == before.version
        eventually(lambda: ask(cluster.endpoints[1]).health == cluster_pb2.CLUSTER_HEALTH_UNKNOWN)
        etcd.start()
        eventually(lambda: ask(cluster.endpoints[0]).health == cluster_pb2.CLUSTER_HEALTH_OK)
        cluster.check()


def test_a_store_that_lost_its_data_is_not_relied_on(
    etcd: EtcdCluster, on_etcd: dict[str, object], eventually: Eventually
) -> None:
    with LocalCluster(servers=2, settings=on_etcd) as cluster:
        before = routing_at(cluster.endpoints[0])
        etcd.kill()
        etcd.wipe()
        etcd.start()

        def is_told() -> bool:
            answers = [ask(address) for address in cluster.endpoints]
            return all(
                answer.health == cluster_pb2.CLUSTER_HEALTH_UNKNOWN
                and "lost" in answer.health_reason
                for answer in answers
            )

        eventually(is_told)
        cluster.check()
        assert routing_at(cluster.endpoints[0]).version == before.version
        # No node has begun a second cluster in it.
        assert names_below(etcd, "") == []


def test_a_store_that_refuses_the_credentials_is_said(
    command: Command,
    etcd: EtcdCluster,
    on_etcd: dict[str, object],
    eventually: Eventually,
) -> None:
    with LocalCluster(servers=2, settings=on_etcd) as cluster:
        before = routing_at(cluster.endpoints[0])
        etcd.etcdctl("user", "add", "root:right")
        etcd.etcdctl("user", "grant-role", "root", "root")
        etcd.etcdctl("auth", "enable")
        # One that starts has nothing to go on with.
        done = command(
            *("pserver", "serve", *LOOPBACK, "--cluster", "local"),
            *("--store", "etcd", "--store-endpoints", etcd.endpoints[0]),
            *("--store-username", "root"),
            BACKSTAY_STORE_PASSWORD="wrong",
        )
        assert done.returncode == 2
        assert "refuses user 'root'" in done.stderr
        # Running nodes notice with the next change (etcd lets anybody renew a lease), say what
        # is wrong, and serve on.
        cluster.kill(1)
        eventually(lambda: "wants user and password" in ask(cluster.endpoints[0]).health_reason)
        assert routing_at(cluster.endpoints[0]).version == before.version


def test_a_paused_node_loses_its_slots_and_comes_back_as_itself(
    etcd: EtcdCluster, on_etcd: dict[str, object], eventually: Eventually
) -> None:
    with LocalCluster(servers=2, settings=on_etcd) as cluster:
        before = record(etcd, "pservers/ps-1")
        cluster.pause(1)
        eventually(lambda: "pservers/ps-1" not in names_below(etcd, "pservers/"))
        eventually(lambda: routing_at(cluster.endpoints[0]).slots_per_node()["ps-0"] == 1024)
        cluster.resume(1)
        eventually(lambda: "pservers/ps-1" in names_below(etcd, "pservers/"))
        after = record(etcd, "pservers/ps-1")
        assert after["instance"] == before["instance"]
        assert after["incarnation"] == 2


def test_a_cluster_with_too_few_nodes_runs_and_says_so() -> None:
    with LocalCluster(servers=1, settings={"replicas": 3}) as cluster:
        answer = ask(cluster.endpoints[0])
        assert answer.health == cluster_pb2.CLUSTER_HEALTH_UNHEALTHY
        assert "1 node for 3 copies" in answer.health_reason
        assert (routing_from_message(answer).master_of_slot == 0).all()


def test_a_node_that_is_stopped_hands_its_slots_over_first(
    etcd: EtcdCluster, on_etcd: dict[str, object]
) -> None:
    with LocalCluster(servers=2, settings=on_etcd) as cluster:
        cluster.servers[1].process.send_signal(signal.SIGTERM)
        assert cluster.servers[1].process.wait(LIMIT_S) == 0
        kinds = [record(etcd, name)["kind"] for name in names_below(etcd, "events/")]
        assert "handed_over" in kinds
        assert "unavailable" not in kinds
        assert (routing_at(cluster.endpoints[0]).master_of_slot >= 0).all()


def test_a_whole_cluster_that_was_killed_begins_anew_and_says_so(eventually: Eventually) -> None:
    with LocalCluster(servers=3) as cluster:
        for index in range(3):
            cluster.kill(index)
        cluster.restart(0, 1, 2)

        def is_whole() -> bool:
            routing = routing_at(cluster.endpoints[0])
            return bool((routing.master_of_slot >= 0).all()) and routing.generation > 0

        eventually(is_whole)
        eventually(lambda: "began anew (generation" in ask(cluster.endpoints[0]).health_reason)


def test_a_node_can_join_a_running_cluster(eventually: Eventually) -> None:
    with LocalCluster(servers=2) as cluster:
        before = routing_at(cluster.endpoints[0])
        cluster.add_node()
        eventually(
            lambda: "ps-2" in {node.node_id for node in routing_at(cluster.endpoints[0]).nodes}
        )
        # It gets slots when an operator asks for a rebalance.
        after = routing_at(cluster.endpoints[0])
        assert (after.master_of_slot == before.master_of_slot).all()


def test_a_process_that_was_taken_for_dead_ends(
    etcd: EtcdCluster, on_etcd: dict[str, object]
) -> None:
    with LocalCluster(servers=2, settings=on_etcd) as cluster:
        member = record(etcd, "pservers/ps-1")
        death = {
            "instance": member["instance"],
            "id": "ps-1",
            "by": "ps-0",
            "reason": "a test says so",
            "time": "2026-11-21",
        }
        etcd.etcdctl("put", f"/local/gone/{member['instance']}", json.dumps(death))
        etcd.etcdctl("lease", "revoke", f"{member['lease']:x}")
        assert cluster.servers[1].process.wait(LIMIT_S) == 1
        assert "taken for dead" in cluster.servers[1].log_tail()
        with pytest.raises(BackstayError, match="ps-1"):
            cluster.check()
