"""A trainer's registration: a thread that tells one pserver every few seconds that it is alive.

Best effort: whatever fails is tried again later at another server, and training neither waits for
it nor ends by it. Imports the directory and the errors; never moves rows, and never holds its
:class:`~backstay.trainer.Client`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from backstay._proto.v1 import trainers_pb2
from backstay.backoff import Backoff
from backstay.cluster.directory import Directory
from backstay.errors import BackstayError, ClosedError

__all__ = ["NO_JOB", "TrainerName", "TrainerRegistration"]

_LOG = logging.getLogger(__name__)

_CALL_LIMIT_S = 1.0
# A trainer that ends waits at most so long to say so; else its time to live takes care of it.
_DEREGISTER_LIMIT_S = 0.3
_RETRY = Backoff(first_s=0.4, longest_s=5.0)
_JOIN_S = 2.0
_HOST_CHARACTERS = 64


class TrainerName(NamedTuple):
    """What a trainer works for.

    Attributes:
        job: Name of the job; empty for none.
        worker: The job's worker; empty for a loop of one's own.
    """

    job: str = ""
    worker: str = ""


NO_JOB = TrainerName()


class TrainerRegistration:
    """The thread of one client, from :meth:`start` to :meth:`close`."""

    def __init__(
        self, directory: Directory, pushes: Callable[[], int], name: TrainerName = NO_JOB
    ) -> None:
        """Prepare.

        Args:
            directory: Asks the servers.
            pushes: Returns the acknowledged pushes so far.
            name: What the trainer works for.
        """
        self._directory = directory
        self._pushes = pushes
        host = socket.gethostname()
        readable = re.sub(r"[^A-Za-z0-9_.-]", "-", host)[:_HOST_CHARACTERS]
        self._trainer = trainers_pb2.Trainer(
            id=f"{readable}-{os.getpid()}-{secrets.token_hex(3)}",
            host=host,
            pid=os.getpid(),
            job=name.job,
            worker=name.worker,
            start_time=time.time(),
        )
        self._last_push_s: float | None = None
        # Trainers spread over the servers.
        self._turn = secrets.randbelow(1 << 16)
        self._endpoint = ""
        self._retries = _RETRY.begin()
        self._closing = threading.Event()
        # A daemon: a program that forgets to close its client must still end.
        self._thread = threading.Thread(target=self._run, name="backstay-registration", daemon=True)

    @property
    def trainer_id(self) -> str:
        """Its id in the cluster."""
        return self._trainer.id

    def start(self) -> None:
        """Register, and go on saying so."""
        self._thread.start()

    def close(self) -> None:
        """End the registration, if a server answers at once; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_S)
        if self._endpoint:
            with contextlib.suppress(BackstayError):
                self._directory.deregister_trainer(
                    self._endpoint, self._trainer.id, timeout_s=_DEREGISTER_LIMIT_S
                )

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            try:
                pause_s = self._register()
            except ClosedError:
                return
            except BackstayError as error:
                _LOG.debug("this trainer could not register: %s", error)
                self._endpoint = ""
                self._turn += 1
                pause_s = self._retries.next_s()

    def _register(self) -> float:
        """Tell one server; returns the seconds until the next time."""
        now_s = time.monotonic()
        pushes = self._pushes()
        if pushes > self._trainer.pushes:
            self._last_push_s = now_s
        self._trainer.pushes = pushes
        request = trainers_pb2.RegisterTrainerRequest(trainer=self._trainer)
        if self._last_push_s is not None:
            request.last_push_age_ms = int((now_s - self._last_push_s) * 1000)
        if not self._endpoint:
            endpoints = self._directory.endpoints()
            endpoint = endpoints[self._turn % len(endpoints)]
        else:
            endpoint = self._endpoint
        ttl_ms = self._directory.register_trainer(endpoint, request, timeout_s=_CALL_LIMIT_S)
        self._endpoint = endpoint
        self._retries.reset()
        return ttl_ms / 3000
