"""Token and TLS, one setting for both planes, on real nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backstay import rpc
from backstay.config import ClientConfig
from backstay.errors import BackstayError, ServerUnavailable, Unauthenticated
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import TableSpec
from backstay.trainer.client import Client

Command = Callable[..., Any]
TOKEN = "a-secret-of-many-characters"
DEADLINE_MS = 3000


@dataclass(frozen=True)
class Certificates:
    ca: str
    cert: str
    key: str

    def server_settings(self) -> dict[str, object]:
        return {"tls_ca_file": self.ca, "tls_cert_file": self.cert, "tls_key_file": self.key}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def make_certificates(folder: Path) -> Certificates:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    (folder / "cert.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return Certificates(*(str(folder / f"{name}.pem") for name in ("ca", "cert", "key")))


def client_config(**settings: Any) -> ClientConfig:
    return ClientConfig(deadline_ms=DEADLINE_MS, connect_timeout_ms=1000, **settings)


def train(cluster: LocalCluster, config: ClientConfig) -> None:
    """Use both planes."""
    with Client(cluster.endpoints, config=config) as client:
        table = client.create_table(TableSpec.sparse("emb", 4))
        client.push(table, np.arange(50), np.ones((50, 4), dtype=np.float32))
        assert client.pull(table, np.arange(50)).shape == (50, 4)


def test_a_token_guards_both_planes_and_the_health_check_needs_none(command: Command) -> None:
    with LocalCluster(servers=2, settings={"token": TOKEN}) as cluster:
        train(cluster, client_config(token=TOKEN))
        with pytest.raises(Unauthenticated, match="wrong token"):
            train(cluster, client_config(token=TOKEN + "x"))
        with pytest.raises(Unauthenticated, match="no token"):
            train(cluster, client_config())
        with grpc.insecure_channel(cluster.endpoints[0]) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        here = ("pserverctl", "--endpoint", cluster.endpoints[0], "status", "--json")
        assert json.loads(command(*here, BACKSTAY_TOKEN=TOKEN).stdout)["healthy"] is True
        refused = command(*here)
        assert refused.returncode == 3
        assert "no token" in refused.stderr
        for server in cluster.servers:
            assert TOKEN not in server.log_path.read_text()
            assert TOKEN not in Path(f"/proc/{server.pid}/cmdline").read_text()


@contextmanager
def plain_channel_to_a_server_with_a_token() -> Iterator[Any]:
    with (
        LocalCluster(servers=1, settings={"token": TOKEN}) as cluster,
        grpc.insecure_channel(cluster.endpoints[0]) as channel,
    ):
        yield channel


def test_reflection_and_every_service_want_the_token() -> None:
    with plain_channel_to_a_server_with_a_token() as channel:
        for method in (
            "/backstay.v1.ClusterService/GetCluster",
            "/backstay.v1.TablesService/ListTables",
            "/backstay.v1.NodeService/Describe",
        ):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(method)(b"", timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        with pytest.raises(grpc.RpcError) as refused:
            list(channel.stream_stream(method)(iter([b""]), timeout=30))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_one_certificate_serves_both_planes_and_the_nodes_among_themselves(
    certificates: Certificates, tmp_path: Path
) -> None:
    settings = {**certificates.server_settings(), "token": TOKEN}
    with LocalCluster(servers=3, settings=settings) as cluster:
        train(cluster, client_config(token=TOKEN, tls_ca_file=certificates.ca))
        with pytest.raises(Unauthenticated):
            train(cluster, client_config(tls_ca_file=certificates.ca))
        # Plain text to a TLS port, and a server that the client has no reason to trust.
        with pytest.raises(ServerUnavailable, match=cluster.endpoints[0]):
            train(cluster, client_config(token=TOKEN))
        other = make_certificates(tmp_path)
        with pytest.raises(ServerUnavailable):
            train(cluster, client_config(token=TOKEN, tls_ca_file=other.ca))


def test_clients_without_a_certificate_are_refused_where_one_is_required(
    certificates: Certificates,
) -> None:
    settings = {**certificates.server_settings(), "tls_require_client_cert": True}
    with LocalCluster(servers=2, settings=settings) as cluster:
        train(
            cluster,
            client_config(
                tls_ca_file=certificates.ca,
                tls_cert_file=certificates.cert,
                tls_key_file=certificates.key,
            ),
        )
        with pytest.raises(BackstayError):
            train(cluster, client_config(tls_ca_file=certificates.ca))


def test_the_token_is_compared_whole() -> None:
    # Not a prefix, not another scheme, not a second value.
    with plain_channel_to_a_server_with_a_token() as channel:
        call = channel.unary_unary("/backstay.v1.TablesService/ListTables")
        good = rpc.bearer(TOKEN)
        call(b"", timeout=30, metadata=((rpc.AUTHORIZATION_KEY, good),))
        for wrong in (good[:-1], good + "x", TOKEN, good.lower(), "Bearer ", ""):
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=30, metadata=((rpc.AUTHORIZATION_KEY, wrong),))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
