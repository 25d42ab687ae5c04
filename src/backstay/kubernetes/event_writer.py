"""Writes the Events of a job: why its workers ended, and changes of its numbers with their reasons.

They are about the job's Deployment, so ``kubectl describe`` shows them. A job goes on without them:
what cannot be written is tried again later, and said in the log. ``job_events`` decides; this
module makes the calls. Imports the modules beside it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time

from backstay.errors import KubernetesError
from backstay.job_engine.launch import WorkerExit
from backstay.kubernetes.api import KubernetesApi
from backstay.kubernetes.job_events import (
    EventLog,
    EventSeries,
    event_body,
    event_change,
    of_exit,
)
from backstay.kubernetes.objects import Owner
from backstay.kubernetes.published_status import how_ended
from backstay.kubernetes.refusals import why_refused

__all__ = ["EventWriter"]

# At most one call in such a time.
CALL_PAUSE_S = 1.0
# At the end of the process so many calls are made at most.
LAST_CALLS_MAX = 20
NOT_FOUND = 404
CONFLICT = 409

log = logging.getLogger(__name__)


class EventWriter:
    """The Events about one Deployment; ``note`` and ``note_exit`` may be called from any thread."""

    def __init__(self, api: KubernetesApi, owner: Owner) -> None:
        """Begin with none.

        Args:
            api: The namespace of the job.
            owner: The Deployment.
        """
        self._api = api
        self._owner = owner
        self._log = EventLog(owner.uid, secrets.token_hex(8))
        self._lock = threading.Lock()
        self._said = ""

    def note(self, reason: str, message: str, *, is_warning: bool = False, once: str = "") -> None:
        """Tell that something happened; see ``EventLog.note``."""
        with self._lock:
            self._log.note(
                reason,
                message,
                is_warning=is_warning,
                unix_s=time.time(),
                now_s=time.monotonic(),
                once=once,
            )

    def note_exit(self, end: WorkerExit) -> None:
        """Tell that a worker ended."""
        reason, message, is_warning = of_exit(end, how_ended(end))
        # An id stands for one process. What is known of its last words differs from one job master
        # to the next.
        self.note(reason, message, is_warning=is_warning, once=end.worker_id)

    async def run(self) -> None:
        """Write what is due; never returns."""
        while True:
            await asyncio.sleep(CALL_PAUSE_S)
            with self._lock:
                series = self._log.due(time.monotonic())
            if series is not None:
                await asyncio.to_thread(self._try, series)

    def write_rest(self) -> None:
        """Write what is left, until a call fails. Blocks."""
        with self._lock:
            rest = self._log.rest()[-LAST_CALLS_MAX:]
        for series in rest:
            if not self._try(series):
                return

    def _try(self, series: EventSeries) -> bool:
        """Make or change one Event; return whether that succeeded."""
        try:
            self._write(series)
            with self._lock:
                self._log.written(series, time.monotonic())
        except KubernetesError as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning("no Event is written: %s", why_refused(error))
            return self._fail()
        except Exception:
            # A fault of ours must not end the job.
            log.exception("an Event is not written: %s", series)
            return self._fail()
        self._said = ""
        return True

    def _fail(self) -> bool:
        with self._lock:
            self._log.failed(time.monotonic())
        return False

    def _write(self, series: EventSeries) -> None:
        body = event_body(series, self._owner, self._api.namespace)
        if series.is_made:
            try:
                self._api.patch("events", body["metadata"]["name"], event_change(series))
            except KubernetesError as error:
                if error.status != NOT_FOUND:
                    raise
                # Kubernetes keeps them for an hour.
            else:
                return
        try:
            self._api.create("events", body)
        except KubernetesError as error:
            # An earlier job master has told the same, or the answer to an earlier call was lost.
            if error.status != CONFLICT:
                raise
