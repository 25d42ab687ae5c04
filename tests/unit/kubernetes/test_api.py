"""Calls of the API of Kubernetes: what a caller gets when an answer breaks off or does not come."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from backstay.errors import KubernetesError
from backstay.kubernetes import api as module
from backstay.kubernetes.api import KubernetesApi

kubernetes = pytest.importorskip("kubernetes")

# It promises more than it brings.
CUT = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
# A watch in which nothing happens.
QUIET = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMIT_S = 10.0


def api_at(listener: socket.socket) -> KubernetesApi:
    settings = kubernetes.client.Configuration()
    settings.host = f"http://127.0.0.1:{listener.getsockname()[1]}"
    return KubernetesApi(kubernetes.client.ApiClient(settings), "default")


def serve_one(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65_536)
        connection.sendall(answer)


@pytest.mark.parametrize(
    "call",
    [
        lambda api: api.list_objects("pods", "a=b"),
        lambda api: api.get("deployments", "backstay-census"),
        lambda api: api.log("a-pod", lines=10),
    ],
    ids=["list", "get", "log"],
)
def test_an_answer_that_breaks_off_is_an_error_of_kubernetes(
    call: Callable[[KubernetesApi], object],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        server = threading.Thread(target=serve_one, args=(listener, CUT))
        server.start()
        api = api_at(listener)
        try:
            with pytest.raises(KubernetesError, match="broke off"):
                call(api)
        finally:
            server.join(LIMIT_S)
            api.close()


def test_a_token_that_cannot_be_read_now_is_an_error_of_kubernetes() -> None:
    def rotated(_settings: object) -> None:
        raise kubernetes.config.ConfigException("Token file exists but empty.")

    settings = kubernetes.client.Configuration()
    settings.api_key, settings.refresh_api_key_hook = {"BearerToken": "old"}, rotated
    settings.host = "http://127.0.0.1:1"
    api = KubernetesApi(kubernetes.client.ApiClient(settings), "default")
    with pytest.raises(KubernetesError, match="Token file exists but empty"):
        api.get("deployments", "backstay-census")
    api.close()


def test_a_command_in_a_pod_is_given_up_when_the_api_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CALL_S", 0.1)
    # It takes the connection, and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        api = api_at(listener)
        with pytest.raises(KubernetesError, match="no command began within"):
            api.run_in_pod("a-pod", "master", ["true"])
        api.close()


def serve_watch(listener: socket.socket, answers: bool) -> None:
    """Take the request of a watch, and answer it now or when the client has waited for long."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(65_536)
        if answers:
            connection.sendall(QUIET)
        connection.settimeout(LIMIT_S)
        try:
            connection.recv(1)
        except TimeoutError:
            connection.sendall(QUIET)


@pytest.mark.parametrize(("answers", "error"), [(False, "does not answer"), (True, "watch.*broke")])
def test_a_watch_that_is_not_answered_or_says_nothing_is_given_up(
    answers: bool, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The limit that must not end it is longer than the server's patience.
    monkeypatch.setattr(module, "CALL_S", 2 * LIMIT_S if answers else 0.1)
    monkeypatch.setattr(module, "WATCH_SILENT_S", 0.1 if answers else 2 * LIMIT_S)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        server = threading.Thread(target=serve_watch, args=(listener, answers))
        server.start()
        api = api_at(listener)
        try:
            with pytest.raises(KubernetesError, match=error):
                list(api.watch_pods("a=b", "1"))
        finally:
            api.close()
            server.join(LIMIT_S)


def kubeconfig(server: str) -> str:
    return json.dumps(
        {
            "clusters": [{"name": "a", "cluster": {"server": server}}],
            "users": [{"name": "a", "user": {}}],
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
            "current-context": "a",
        }
    )


def test_a_connection_asks_now_and_then_whether_the_other_side_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        server = threading.Thread(target=serve_one, args=(listener, QUIET))
        server.start()
        path = tmp_path / "config"
        path.write_text(kubeconfig(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        monkeypatch.setenv("KUBECONFIG", str(path))
        api = KubernetesApi.of_kubeconfig()
        try:
            watch = api.watch_pods("a=b", "1")
            sock = watch._response.connection.sock
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            watch.close()
        finally:
            api.close()
            server.join(LIMIT_S)
