"""What real nodes tell Prometheus, and pserverctl: parsed, documented, and moving."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from backstay.config import ClientConfig
from backstay.pserver.local_cluster import LocalCluster, LocalServer
from backstay.tables import SGD, TableSpec, Zeros
from backstay.trainer import Client
from tests.integration.exporting import NAME as EXPORT
from tests.integration.exporting import (
    controller_of,
    elements_in,
    finished,
    start_export,
    stop_export,
)

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "metrics.md"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
SPEC = TableSpec.sparse("user/emb", 4, optimizer=SGD(1.0), initializer=Zeros())
NAME = re.compile(r"\b(?:backstay|process)_[a-z_]+\b")

Command = Callable[..., Any]
Eventually = Callable[[Callable[[], bool]], None]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(server: LocalServer) -> str:
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return str(answer.read().decode())


def samples(server: LocalServer) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(scrape(server))
        for sample in family.samples
    }


def value(server: LocalServer, name: str, **labels: str) -> float:
    return samples(server)[f"backstay_{name}", frozenset(labels.items())]


def summed(servers: list[LocalServer], name: str, **labels: str) -> float:
    return sum(value(server, name, **labels) for server in servers)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Three nodes with two copies; what kills one of them comes last in this file."""
    settings = {"replicas": 2, "slot_count": 64, "memory_limit_bytes": 2**30}
    with LocalCluster(servers=3, settings=settings) as running:
        with Client(running.endpoints) as client:
            client.create_table(SPEC)
        yield running


def metric_names(server: LocalServer) -> set[str]:
    """The names as the page has them: a histogram by its own, not its series'."""
    names = set()
    for family in text_string_to_metric_families(scrape(server)):
        for sample in family.samples:
            is_histogram = family.type == "histogram"
            names.add(family.name if is_histogram else sample.name)
        if not family.samples:
            # Of exports, while there is none.
            names.add(family.name + ("_total" if family.type == "counter" else ""))
    return names


def test_the_text_is_what_prometheus_reads(cluster: LocalCluster) -> None:
    families = list(text_string_to_metric_families(scrape(cluster.servers[0])))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation, f"{family.name} has no HELP"
        assert family.type in ("counter", "gauge", "histogram"), family.name
        if family.type == "histogram":
            buckets = [one for one in family.samples if one.name.endswith("_bucket")]
            counts = [one.value for one in buckets]
            bounds = [float(one.labels["le"]) for one in buckets]
            assert counts == sorted(counts)
            assert bounds == sorted(bounds)
            assert bounds[-1] == float("inf")
            (total,) = (one.value for one in family.samples if one.name.endswith("_count"))
            assert total == counts[-1]


def test_the_page_and_the_dashboards_ask_only_for_what_is_there(cluster: LocalCluster) -> None:
    there = {name for name, _ in samples(cluster.servers[0])}
    bases = metric_names(cluster.servers[0])
    assert set(NAME.findall(PAGE.read_text(encoding="utf-8"))) <= there | bases
    assert DASHBOARDS
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        queries = [
            target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
        ]
        queries += [
            one["query"]["query"]
            for one in dashboard["templating"]["list"]
            if one["type"] == "query"
        ]
        assert len(queries) > 20
        for query in queries:
            asked = NAME.findall(query)
            assert asked, query
            assert set(asked) <= there | bases, query


def test_plain_curl_reads_it_and_finds_nothing_else(cluster: LocalCluster) -> None:
    address = cluster.servers[0].metrics_address
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    done = subprocess.run(
        [curl, "--silent", "--fail", f"http://{address}/metrics"],
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    assert "# HELP backstay_transactions_total " in done.stdout
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{address}/", timeout=30)


def test_traffic_moves_the_figures(cluster: LocalCluster) -> None:
    servers = cluster.servers
    keys = np.arange(500, dtype=np.uint64)
    with Client(cluster.endpoints) as client:
        client.push("user/emb", keys, np.ones((500, 4), np.float32))
        client.pull("user/emb", keys)
    assert summed(servers, "transactions_total", outcome="committed") >= 3
    assert summed(servers, "commit_seconds_count") >= 3
    assert summed(servers, "stage_seconds_count") >= 3
    assert summed(servers, "pulls_total") >= 1
    assert summed(servers, "keys_pushed_total") == 500
    # Two copies of each row.
    assert summed(servers, "table_rows", table="user/emb") == 1000
    for peer in ("client", "server"):
        assert summed(servers, "data_received_bytes_total", peer=peer) > 500 * 16
    assert summed(servers, "slots", role="master") == 64
    assert summed(servers, "slots", role="in_sync") == 64
    assert summed(servers, "slot_roles", role="master") == 64
    assert summed(servers, "slot_roles", role="backup") == 64
    assert summed(servers, "controller") == 1
    for server in servers:
        assert value(server, "memory_limit_bytes") == 2**30
        parts = ("rows", "counters", "streams", "transactions", "copies", "buffers", "process")
        part = {name: value(server, "memory_part_bytes", part=name) for name in parts}
        assert min(part["rows"], part["streams"], part["buffers"], part["process"]) > 0
        assert sum(part.values()) < 2**30
        assert value(server, "store_reachable") == 1
        assert 0 < value(server, "lease_remaining_seconds") <= 3
        assert value(server, "cluster_status", status="OK") == 1


def test_how_stale_pushes_are_is_counted_by_table(cluster: LocalCluster, command: Command) -> None:
    keys = np.arange(500, dtype=np.uint64)
    spec = TableSpec.sparse("stale/emb", 4, optimizer=SGD(1.0), initializer=Zeros())
    ones = np.ones((500, 4), np.float32)
    measuring = ClientConfig(measure_staleness=True)
    with (
        Client(cluster.endpoints, config=measuring) as slow,
        Client(cluster.endpoints) as fast,
    ):
        table = slow.create_table(spec)
        slow.pull(table, keys)
        for _ in range(5):
            fast.push("stale/emb", keys, ones)
        slow.push(table, keys, ones)
        stats = slow.stats()
        assert (stats.stale_slots, stats.staleness_sum) == (64, 320)
        assert (stats.staleness_max, stats.staleness_unknown) == (5, 0)
        assert fast.stats().stale_slots == 0
    servers = cluster.servers
    assert summed(servers, "push_staleness_count", table="stale/emb") == 64
    assert summed(servers, "push_staleness_sum", table="stale/emb") == 320
    for bound, count in (("3.0", 0), ("7.0", 64)):
        assert summed(servers, "push_staleness_bucket", table="stale/emb", le=bound) == count
    shown = command("pserverctl", "--endpoint", cluster.endpoints[0], "tables", "--json")
    (told,) = (one for one in json.loads(shown.stdout)["tables"] if one["name"] == "stale/emb")
    assert (told["stale_slots"], told["staleness_sum"]) == (64, 320)


def test_a_running_export_is_told_of_by_the_controller(
    cluster: LocalCluster, tmp_path: Path, eventually: Eventually
) -> None:
    with Client(cluster.endpoints) as client:
        client.push(SPEC.name, np.arange(100), np.ones((100, 4), np.float32))
    start_export(cluster, tmp_path)
    eventually(lambda: len(finished(tmp_path)) > 1)
    controller = cluster.servers[controller_of(cluster)]
    eventually(lambda: value(controller, "export_element", export=EXPORT) > 1)
    rows = value(controller, "export_rows_total", export=EXPORT)
    assert rows >= 100
    size = sum(one.total_bytes for one in elements_in(tmp_path))
    assert 0 < value(controller, "export_bytes_total", export=EXPORT) <= size + 100_000
    assert value(controller, "export_elements_total", export=EXPORT, outcome="base") == 1
    assert value(controller, "export_elements_total", export=EXPORT, outcome="increment") >= 1
    assert value(controller, "export_elements_total", export=EXPORT, outcome="failed") == 0
    assert 0 <= value(controller, "export_age_seconds", export=EXPORT) < 60
    others = [one for one in cluster.servers if one is not controller]
    assert not any(name == "backstay_export_element" for one in others for name, _ in samples(one))
    stop_export(cluster)
    eventually(
        lambda: not any(name == "backstay_export_element" for name, _ in samples(controller))
    )


def test_a_push_that_is_rolled_back_shows_and_is_applied_once(
    cluster: LocalCluster, eventually: Eventually
) -> None:
    servers = cluster.servers
    victim = next(index for index, one in enumerate(servers) if not value(one, "controller"))
    left = [one for index, one in enumerate(servers) if index != victim]
    before = summed(left, "transactions_total", outcome="rolled_back")
    # Not the victim's: it does not answer.
    with Client([one.control_address for one in left]) as client, ThreadPoolExecutor(1) as pool:
        spec = TableSpec.sparse("rolled/back", 4, optimizer=SGD(1.0), initializer=Zeros())
        table = client.create_table(spec)
        keys = np.arange(500, dtype=np.uint64)
        os.kill(cluster.pids[victim], signal.SIGSTOP)
        try:
            push = pool.submit(client.push, table, keys, -np.ones((500, 4), np.float32))
            # A backup that is silent longer than prepare_timeout_ms.
            eventually(lambda: summed(left, "transactions_total", outcome="rolled_back") > before)
        finally:
            os.kill(cluster.pids[victim], signal.SIGCONT)
        push.result(timeout=30)
        assert np.array_equal(client.pull(table, keys), np.ones((500, 4), np.float32))
    assert summed(left, "rollback_seconds_count") > 0
    assert summed(left, "rollback_seconds_sum") > 0.9


def check(server: LocalServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{server.metrics_address}{path}", timeout=30) as answer:
            return int(answer.status), str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_node_that_came_back_is_ready_when_its_copies_are(
    command: Command, eventually: Eventually
) -> None:
    # Slow, so that the copies are still under way when the node serves.
    settings = {"replicas": 2, "slot_count": 64, "copy_bytes_per_s": 65_536}
    keys = np.arange(20_000, dtype=np.uint64)
    with (
        LocalCluster(servers=2, settings=settings) as cluster,
        Client(cluster.endpoints) as client,
    ):
        client.push(client.create_table(SPEC), keys, np.ones((20_000, 4), np.float32))
        cluster.kill(1)
        cluster.restart(1)
        whole, anew = cluster.servers
        code, why = check(anew, "/ready")
        assert code == 503
        assert re.fullmatch(r"slots with fewer copies in sync than wanted: \d+\n", why)
        assert check(whole, "/ready") == check(anew, "/live") == (200, "ok\n")
        eventually(lambda: check(anew, "/ready") == (200, "ok\n"))
        status = command("pserverctl", "--endpoint", cluster.endpoints[0], "status", "--json")
        assert json.loads(status.stdout)["slots_short_of_copies"] == 0


def test_a_killed_node_shows_in_the_figures_of_the_others(
    cluster: LocalCluster, command: Command, eventually: Eventually
) -> None:
    servers = cluster.servers
    victim = next(index for index, one in enumerate(servers) if not value(one, "controller"))
    left = [one for index, one in enumerate(servers) if index != victim]
    promotions = summed(left, "promotion_seconds_count")
    version = value(left[0], "routing_version")
    lost = servers[victim].node_id
    cluster.kill(victim)
    eventually(lambda: summed(left, "failover_seconds_count") == 1)
    eventually(lambda: summed(left, "slot_roles", role="master") == 64)
    assert 0 < summed(left, "failover_seconds_sum") < 5
    assert summed(left, "promotion_seconds_count") > promotions
    assert summed(left, "in_sync_changes_total", change="removed") > 0
    # The copies that were lost are made anew on the two that are left.
    eventually(lambda: summed(left, "slots", role="in_sync") == 64)
    assert summed(left, "slots_installed_total") > 0
    assert summed(left, "in_sync_changes_total", change="added") > 0
    assert all(value(one, "routing_version") > version for one in left)
    assert all(value(one, "cluster_nodes") == 2 for one in left)

    here = ("pserverctl", "--endpoint", left[0].control_address)
    report = json.loads(command(*here, "status", "--json").stdout)
    assert report["store_reachable"] is True
    assert report["last_failover"]["node_id"] == lost
    assert report["last_failover"]["duration_ms"] > 0
    assert report["slots_short_of_copies"] == report["slots_catching_up"] == 0
    assert [node["control"]["controller"] for node in report["nodes"]].count(True) == 1
    assert f"last failover: {lost}, in " in command(*here, "status").stdout
    events = json.loads(command(*here, "events", "--json").stdout)["events"]
    assert events[0]["kind"] == "created"
    versions = [event["routing_version"] for event in events]
    assert versions == sorted(versions)
    assert any(event["node_id"] == lost for event in events)
    newest = command(*here, "events", "--newest", "1").stdout
    assert newest.splitlines() == [
        f"routing {events[-1]['routing_version']}  {events[-1]['kind']}: {events[-1]['reason']}"
    ]
