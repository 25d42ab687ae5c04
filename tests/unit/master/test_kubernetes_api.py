"""Calls of the API of Kubernetes: what a caller gets when an answer breaks off."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from backstay.errors import KubernetesError
from backstay.master.kubernetes import api as module
from backstay.master.kubernetes.api import KubernetesApi

kubernetes = pytest.importorskip("kubernetes")

# It promises more than it brings.
CUT = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
LIMIT_S = 10.0


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
        settings = kubernetes.client.Configuration()
        settings.host = f"http://127.0.0.1:{listener.getsockname()[1]}"
        api = KubernetesApi(kubernetes.client.ApiClient(settings), "default")
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
        settings = kubernetes.client.Configuration()
        settings.host = f"http://127.0.0.1:{listener.getsockname()[1]}"
        api = KubernetesApi(kubernetes.client.ApiClient(settings), "default")
        with pytest.raises(KubernetesError, match="no command began within"):
            api.run_in_pod("a-pod", "master", ["true"])
        api.close()
