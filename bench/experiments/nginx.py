"""Debian's NGINX in the cluster: its image, its Pods, its number by the load, and the load.

The image holds the program as Debian's package has it and the libraries of this machine. Every
request opens a connection of its own, so each is one decision of the Service whom to ask. Every
call has a limit.
"""

from __future__ import annotations

import http.client
import re
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from kubernetes.client import ApiException, AppsV1Api
from urllib3.exceptions import HTTPError

from bench.experiments.plan import LoadCurve, replicas_for
from tests.kubernetes.build import CannotRun, cache_folder, prune
from tests.kubernetes.images import ImageConfig, Layer, write_image
from tests.kubernetes.namespace import Namespace

__all__ = ["IMAGE", "NAME", "Load", "Nginx", "nginx_image"]

IMAGE = "localhost/nginx:test"
NAME = "nginx"
PORT = 8080
USER_ID = 10002
APT_LIMIT_S = 120.0
CONFIGURATION = f"""
daemon off;
pid /tmp/nginx.pid;
error_log stderr warn;
worker_processes 1;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path /tmp/body;
  proxy_temp_path /tmp/proxy;
  fastcgi_temp_path /tmp/fastcgi;
  uwsgi_temp_path /tmp/uwsgi;
  scgi_temp_path /tmp/scgi;
  server {{
    listen {PORT} backlog=256;
    location / {{ return 200 "served\\n"; }}
  }}
}}
"""
# Until every kube-proxy has heard that the Pod serves no more.
LEAVE_S = 5
CALL_LIMIT_S = 5.0
REQUEST_LIMIT_S = 10.0
SCALE_PAUSE_S = 2.0
SENDERS = 32
JOIN_LIMIT_S = 30.0
FAILURES_KEPT = 20


def nginx_image() -> Path:
    """Return the image's tar file, made of Debian's package if it is not there.

    Raises:
        CannotRun: The package cannot be had.
    """
    with TemporaryDirectory(prefix="nginx-") as folder:
        program = _program(Path(folder))
        layer = Layer()
        for name in ("bin", "lib", "lib64", "sbin"):
            layer.folder(f"usr/{name}")
            layer.link(name, f"usr/{name}")
        layer.folder("tmp", mode=0o1777)
        layer.folder("var/log/nginx", mode=0o1777)
        layer.text("etc/passwd", f"nginx:x:{USER_ID}:{USER_ID}::/tmp:/bin/false\n")
        layer.text("etc/group", f"nginx:x:{USER_ID}:\n")
        layer.text("etc/nginx.conf", CONFIGURATION)
        layer.file("usr/sbin/nginx", program)
        for library in _libraries(program):
            layer.file(f"usr/{str(library).removeprefix('/usr').lstrip('/')}", library)
        path = cache_folder() / f"nginx-{layer.digest()[:16]}.tar"
        if not path.exists():
            write_image(path, IMAGE, layer, ImageConfig(user=f"{USER_ID}:{USER_ID}"))
    path.touch()
    prune("nginx-*.tar")
    return path


def _program(folder: Path) -> Path:
    """Unpack Debian's package into the folder, without installing it; return the program."""
    for command in (["apt-get", "download", "nginx"], ["sh", "-c", "dpkg-deb -x nginx_*.deb root"]):
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=APT_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotRun(f"Debian's nginx cannot be had: {error}") from error
        if done.returncode:
            raise CannotRun(f"Debian's nginx cannot be had (apt-get update?): {done.stderr}")
    return folder / "root" / "usr" / "sbin" / "nginx"


def _libraries(program: Path) -> list[Path]:
    done = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=60, check=False)
    if "not found" in done.stdout:
        raise CannotRun(f"Libraries of nginx are missing here:\n{done.stdout}")
    return [Path(one) for one in re.findall(r"^\t(?:\S+ => )?(/\S+) \(", done.stdout, re.MULTILINE)]


class Nginx:
    """The Deployment and its Service."""

    def __init__(self, namespace: Namespace, *, cpu: str, priority: str) -> None:
        """Prepare.

        Args:
            namespace: Where.
            cpu: What each Pod asks for.
            priority: Its PriorityClass.
        """
        self._namespace = namespace
        self._cpu = cpu
        self._priority = priority
        self._apps = AppsV1Api()

    def start(self, replicas: int) -> str:
        """Make it; return the address of its Service."""
        self._apps.create_namespaced_deployment(self._namespace.name, self._deployment(replicas))
        body = {
            "metadata": {"name": NAME},
            "spec": {"selector": {"app": NAME}, "ports": [{"port": 80, "targetPort": PORT}]},
        }
        made = self._namespace.core.create_namespaced_service(self._namespace.name, body)
        return str(made.spec.cluster_ip)

    def scale(self, replicas: int) -> None:
        """Have so many Pods."""
        self._apps.patch_namespaced_deployment_scale(
            NAME,
            self._namespace.name,
            {"spec": {"replicas": replicas}},
            _request_timeout=CALL_LIMIT_S,
        )

    def ready(self) -> int:
        """Return how many Pods serve."""
        found = self._apps.read_namespaced_deployment(
            NAME, self._namespace.name, _request_timeout=CALL_LIMIT_S
        )
        return int(found.status.ready_replicas or 0)

    def _deployment(self, replicas: int) -> dict[str, Any]:
        container = {
            "name": NAME,
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": ["/usr/sbin/nginx", "-c", "/etc/nginx.conf", "-e", "stderr"],
            "resources": {"requests": {"cpu": self._cpu}},
            "readinessProbe": {"httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1},
            # It serves on until nobody is sent to it any more.
            "lifecycle": {"preStop": {"sleep": {"seconds": LEAVE_S}}},
            "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
        }
        return {
            "metadata": {"name": NAME},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {"app": NAME}},
                "template": {
                    "metadata": {"labels": {"app": NAME}},
                    "spec": {
                        "priorityClassName": self._priority,
                        "terminationGracePeriodSeconds": LEAVE_S + 5,
                        "containers": [container],
                        "volumes": [{"name": "scratch", "emptyDir": {}}],
                    },
                },
            },
        }


class Load:
    """Sends requests by a curve, and scales NGINX by their rate, while its ``with`` block runs.

    Attributes:
        sent: Requests that were begun.
        failures: What became of those that failed: time and why, the first of them.
        failed: How many failed.
        rates: Time in seconds, and requests a second.
        wanted: Time, and how many Pods there shall be.
    """

    def __init__(
        self,
        nginx: Nginx,
        address: str,
        curve: LoadCurve,
        *,
        per_replica: float,
        least: int,
        most: int,
        tell: Callable[[str], None],
    ) -> None:
        self.sent = self.failed = 0
        self.failures: list[tuple[float, str]] = []
        self.rates: list[tuple[float, float]] = []
        self.wanted: list[tuple[float, int]] = [(0.0, least)]
        self._nginx = nginx
        self._address = address
        self._curve = curve
        self._rule = {"per_replica": per_replica, "least": least, "most": most}
        self._tell = tell
        self._counting = threading.Lock()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, name="load", daemon=True),
            threading.Thread(target=self._scale, name="nginx", daemon=True),
        ]
        self._begun_s = 0.0

    def __enter__(self) -> Load:
        self._begun_s = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(JOIN_LIMIT_S)

    def _now(self) -> float:
        return time.monotonic() - self._begun_s

    def _send(self) -> None:
        with ThreadPoolExecutor(SENDERS) as pool:
            while not self._ended.wait(1 / self._curve.rate(self._now())):
                self.sent += 1
                pool.submit(self._request)

    def _request(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=REQUEST_LIMIT_S)
        why = ""
        try:
            connection.request("GET", "/", headers={"Connection": "close"})
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200 or body != b"served\n":
                why = f"status {answer.status}"
        except (OSError, http.client.HTTPException) as error:
            why = repr(error)
        finally:
            connection.close()
        if why:
            with self._counting:
                self.failed += 1
                if len(self.failures) < FAILURES_KEPT:
                    self.failures.append((round(self._now(), 1), why))

    def _scale(self) -> None:
        now = self.wanted[0][1]
        while not self._ended.wait(SCALE_PAUSE_S):
            at_s = self._now()
            rate = self._curve.rate(at_s)
            self.rates.append((at_s, rate))
            wanted = replicas_for(rate, now=now, **self._rule)  # type: ignore[arg-type]
            if wanted == now:
                continue
            try:
                self._nginx.scale(wanted)
            except (ApiException, HTTPError, OSError):
                # Tried again at the next look.
                continue
            self._tell(f"2: {rate:.0f} requests/s: {wanted} NGINX, {now} before")
            now = wanted
            self.wanted.append((at_s, now))
