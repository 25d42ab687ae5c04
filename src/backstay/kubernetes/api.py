"""The API of Kubernetes: a few calls, each with a time limit. The only module that talks to it.

Objects are plain mappings. The client library gives addresses, certificates and tokens; it is
imported when a cluster is needed. An answer that is no success is a ``KubernetesError``.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from backstay.errors import ConfigError, KubernetesError

__all__ = ["KubernetesApi", "ObjectList", "PodWatch", "WatchEvent"]

CONNECT_S = 5.0
CALL_S = 15.0
# The server ends a watch after this time, and the launcher watches on.
WATCH_S = 290
# A watch that says nothing for so long is broken: the server sends bookmarks each minute.
WATCH_SILENT_S = 120.0
# A connection on which nothing comes is tried after this time, and is broken after so many trials
# without an answer: a machine or a router that is gone closes none. As long as Kubernetes' own
# clients wait.
KEEPALIVE_IDLE_S = 30
KEEPALIVE_PAUSE_S = 5
KEEPALIVE_TRIALS = 3
EXEC_S = 60
ANSWER_BYTES_MAX = 64 * 1024 * 1024
PATCH = "application/merge-patch+json"
_PREFIXES = {
    "cronjobs": "/apis/batch/v1",
    "deployments": "/apis/apps/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "statefulsets": "/apis/apps/v1",
}
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ObjectList(NamedTuple):
    """What a list returned."""

    items: tuple[Mapping[str, Any], ...]
    version: str


class WatchEvent(NamedTuple):
    """What a watch told: ``ADDED``, ``MODIFIED``, ``DELETED`` or ``BOOKMARK``."""

    kind: str
    pod: Mapping[str, Any]
    version: str


class KubernetesApi:
    """One namespace of a cluster."""

    def __init__(self, client: Any, namespace: str) -> None:
        """Use ``in_pod`` or ``of_kubeconfig``."""
        self._client = client
        self.namespace = namespace

    @classmethod
    def in_pod(cls, namespace: str = "") -> KubernetesApi:
        """Return the API as a Pod reaches it.

        Raises:
            ConfigError: This is no Pod with a service account, or the library is not installed.
        """
        client, config = _library()
        settings = _settings(client)
        try:
            config.load_incluster_config(client_configuration=settings)
        except config.ConfigException as error:
            raise ConfigError(f"launcher: kubernetes runs in a Pod only: {error}") from error
        if not namespace:
            namespace = _NAMESPACE_FILE.read_text(encoding="ascii").strip()
        return cls(client.ApiClient(settings), namespace)

    @classmethod
    def of_kubeconfig(cls, namespace: str = "") -> KubernetesApi:
        """Return the API that the user's kubeconfig names, or that of the Pod that this is.

        Raises:
            ConfigError: There is none, it cannot be read, or the library is not installed.
        """
        import yaml

        client, config = _library()
        settings = _settings(client)
        try:
            # The library reads the variable once, when it is imported.
            file = os.environ.get("KUBECONFIG")
            config.load_kube_config(file, client_configuration=settings)
            active = config.list_kube_config_contexts(file)
        except config.ConfigException as error:
            if _NAMESPACE_FILE.exists():
                return cls.in_pod(namespace)
            raise ConfigError(
                f"--on kubernetes: no cluster is named: {error}. Set KUBECONFIG, or make "
                "~/.kube/config"
            ) from error
        except (yaml.YAMLError, OSError) as error:
            raise ConfigError(f"--on kubernetes: the kubeconfig cannot be read: {error}") from error
        found = namespace or active[1]["context"].get("namespace", "") or "default"
        return cls(client.ApiClient(settings), found)

    def close(self) -> None:
        """Close the connections."""
        self._client.rest_client.pool_manager.clear()
        self._client.close()

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object, or a part of it such as ``deployments/scale``; None: there is none."""
        try:
            return self._call("GET", self._path(kind, name))
        except KubernetesError as error:
            if error.status == 404:
                return None
            raise

    def create(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make an object; return it as it is then. Status 409: there is one of its name."""
        return self._call("POST", self._path(kind), body)

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Change fields of an object, or of a part of it such as ``deployments/scale``.

        Return it as it is then. With a ``resourceVersion`` (or, of a scale, a ``uid``) in the
        metadata of the change, status 409 says that the object is another one now.
        """
        return self._call("PATCH", self._path(kind, name), change)

    def replace(self, kind: str, body: Mapping[str, Any]) -> None:
        """Make an object what ``body`` says, whatever it was."""
        self._call("PUT", self._path(kind, body["metadata"]["name"]), body)

    def delete(self, kind: str, name: str, *, at_once: bool = False, uid: str = "") -> None:
        """Have an object deleted; what it owns goes after it. One that is gone is no error.

        Args:
            kind: Of the object.
            name: Of the object.
            at_once: Do not wait until a Pod's node says that it has ended.
            uid: Of the one that is meant; another one of the name stays. Empty: whichever it is.
        """
        how = {
            "propagationPolicy": "Background",
            **({"gracePeriodSeconds": 0} if at_once else {}),
            **({"preconditions": {"uid": uid}} if uid else {}),
        }
        try:
            self._call("DELETE", self._path(kind, name), how)
        except KubernetesError as error:
            if error.status != 404 and not (uid and error.status == 409):
                raise

    def list_objects(self, kind: str, selector: str) -> ObjectList:
        """Return all objects with these labels, and the version to watch from."""
        document = self._call("GET", self._path(kind, selector=selector))
        return ObjectList(tuple(document["items"]), document["metadata"]["resourceVersion"])

    def watch_pods(self, selector: str, version: str) -> PodWatch:
        """Begin to watch Pods.

        Raises:
            KubernetesError: Status 410: the version is too old, list again.
        """
        path = self._path(
            "pods",
            selector=selector,
            watch="true",
            resourceVersion=version,
            allowWatchBookmarks="true",
            timeoutSeconds=str(WATCH_S),
        )
        # An answer begins at once, also where no event comes for long.
        response = self._send("GET", path, None, read_s=CALL_S)
        sock = _socket_of(response)
        if sock is not None:
            sock.settimeout(WATCH_SILENT_S)
        return PodWatch(response)

    def log(self, pod: str, *, lines: int) -> str:
        """Return the end of a Pod's log."""
        path = f"{self._path('pods', pod)}/log?tailLines={lines}"
        response = self._send("GET", path, None, read_s=CALL_S)
        return _content(response).decode("utf-8", "replace")

    def run_in_pod(self, pod: str, container: str, command: list[str]) -> tuple[str, str, int]:
        """Run a command in a container; return what it printed, its errors and its exit code."""
        client, _ = _library()
        from kubernetes.stream import stream

        # The library changes the client that it makes a stream with.
        with client.ApiClient(self._client.configuration) as other:
            try:
                answer = _opened(
                    lambda: stream(
                        client.CoreV1Api(other).connect_get_namespaced_pod_exec,
                        pod,
                        self.namespace,
                        container=container,
                        command=command,
                        stdin=False,
                        stdout=True,
                        stderr=True,
                        tty=False,
                        _preload_content=False,
                    )
                )
            except client.ApiException as error:
                raise KubernetesError(
                    f"cannot run a command in Pod {pod}: {error.reason}",
                    status=int(error.status or 0),
                ) from error
            try:
                answer.run_forever(timeout=EXEC_S)
                if answer.is_open():
                    raise KubernetesError(f"a command in Pod {pod} took longer than {EXEC_S} s")
                output, errors = answer.read_stdout() or "", answer.read_stderr() or ""
                return output, errors, int(answer.returncode)
            except (TypeError, ValueError, KeyError) as error:
                # The code comes in a last message, and none comes from a Pod that ends.
                raise KubernetesError(f"a command in Pod {pod} was cut off: it ended") from error
            finally:
                # ``answer.close`` does nothing once the other side has closed, and leaves it open.
                answer.sock.shutdown()

    def _path(self, kind: str, name: str = "", selector: str = "", **query: str) -> str:
        kind, _, part = kind.partition("/")
        prefix = _PREFIXES.get(kind, "/api/v1")
        path = f"{prefix}/namespaces/{quote(self.namespace)}/{kind}"
        if name:
            path += f"/{quote(name)}" + (f"/{part}" if part else "")
        asked = {**({"labelSelector": selector} if selector else {}), **query}
        return f"{path}?{urlencode(asked)}" if asked else path

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        content = _content(self._send(method, path, body, read_s=CALL_S))
        try:
            document: dict[str, Any] = json.loads(content)
        except ValueError as error:
            raise KubernetesError(f"Kubernetes: {method} {path}: the answer is no JSON") from error
        return document

    def _authenticate(self, headers: dict[str, str]) -> None:
        try:
            self._client.update_params_for_auth(headers, [], ["BearerToken"])
        except Exception as error:
            # The library reads a token that is being replaced, or runs a program of the user's.
            raise KubernetesError(f"Kubernetes: no token for this call: {error}") from error

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, read_s: float
    ) -> Any:
        """Send a request; return the response, whose body was not read yet."""
        import urllib3

        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = PATCH if method == "PATCH" else "application/json"
        self._authenticate(headers)
        try:
            response = self._client.rest_client.pool_manager.request(
                method,
                self._client.configuration.host + path,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=urllib3.Timeout(connect=CONNECT_S, read=read_s),
                # Callers repeat calls, and know what is safe to repeat.
                retries=False,
                preload_content=False,
            )
            if response.status < 300:
                return response
            with _released(response):
                text, reason = _words_of(response.read(ANSWER_BYTES_MAX))
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise KubernetesError(f"Kubernetes does not answer: {error}") from error
        raise KubernetesError(
            f"Kubernetes: {text or response.reason}", status=response.status, reason=reason
        )


class PodWatch:
    """Events of a watch, until the server ends it or ``close``."""

    def __init__(self, response: Any) -> None:
        """Take the response of a watch."""
        self._response = response
        self._is_closed = False

    def __iter__(self) -> Iterator[WatchEvent]:
        """Yield events.

        Raises:
            KubernetesError: The watch broke; status 410: list again.
        """
        import urllib3

        rest = b""
        try:
            for part in self._response.stream(65_536):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line:
                        yield _event(json.loads(line))
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            if not self._is_closed:
                raise KubernetesError(f"a watch of Kubernetes broke: {error}") from error
        finally:
            self._response.close()

    def close(self) -> None:
        """End the watch, from any thread; a read that waits ends at once."""
        self._is_closed = True
        # To close the response would wait for the thread that reads it.
        sock = _socket_of(self._response)
        if sock is not None:
            # It may be closed already.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _socket_of(response: Any) -> socket.socket | None:
    """Return the socket that the body of a response comes from; None: it is closed."""
    return getattr(getattr(response, "_connection", None), "sock", None)


def _opened(open_stream: Callable[[], Any]) -> Any:
    """Open a stream; the library has no time limit for that.

    Raises:
        KubernetesError: There was no answer in time. A stream that opens later is closed.
    """
    found: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            stream = open_stream()
        except Exception as error:  # noqa: BLE001 - it is raised again by the thread that waits
            with suppress(futures.InvalidStateError):
                found.set_exception(error)
            return
        try:
            found.set_result(stream)
        except futures.InvalidStateError:
            stream.sock.shutdown()

    threading.Thread(target=run, name="exec in a Pod", daemon=True).start()
    try:
        return found.result(CALL_S)
    except futures.TimeoutError as error:
        if not found.cancel():
            return found.result()
        raise KubernetesError(
            f"Kubernetes does not answer: no command began within {CALL_S:.0f} s"
        ) from error


def _content(response: Any) -> bytes:
    """Read the body of an answer, which may break off."""
    import urllib3

    try:
        with _released(response):
            content: bytes = response.read(ANSWER_BYTES_MAX)
            return content
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise KubernetesError(f"an answer of Kubernetes broke off: {error}") from error


@contextmanager
def _released(response: Any) -> Iterator[None]:
    try:
        yield
    finally:
        response.release_conn()


def _event(document: Mapping[str, Any]) -> WatchEvent:
    kind, item = document["type"], document["object"]
    if kind == "ERROR":
        raise KubernetesError(
            f"a watch of Kubernetes ended: {item.get('message', '')}",
            status=int(item.get("code", 0)),
        )
    return WatchEvent(kind, item, item["metadata"]["resourceVersion"])


def _words_of(content: bytes) -> tuple[str, str]:
    """Return what the API says of an error, and its reason."""
    try:
        document = json.loads(content)
        return str(document.get("message", "")), str(document.get("reason", ""))
    except (ValueError, AttributeError):
        return content[:200].decode("utf-8", "replace"), ""


def _settings(client: Any) -> Any:
    """Return settings of a client whose connections notice that the other side is gone."""
    settings = client.Configuration()
    options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    ]
    # Elsewhere than on Linux the system's own times hold.
    if hasattr(socket, "TCP_KEEPIDLE"):
        options += [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_PAUSE_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_TRIALS),
        ]
    settings.socket_options = options
    return settings


def _library() -> tuple[Any, Any]:
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise ConfigError(
            "Kubernetes needs a client library: pip install 'backstay[kubernetes]' here, and in "
            "the image of the job master (EXTRAS in deploy/Dockerfile)"
        ) from error
    return client, config
