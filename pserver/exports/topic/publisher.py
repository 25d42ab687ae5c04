"""Writes the elements of an export to a topic, in a thread of its own.

The topic follows the folder: one transaction takes it from the state of one element to that of a
later one. A topic that is away, full or slow holds up nothing else, and catches up from the folder:
with increments, or with a base if they are gone. See docs/internals/exports.md.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain

from backstay.checkpoint.chain import Followed
from backstay.checkpoint.manifest import Manifest, number_of
from backstay.checkpoint.storage import ExportFolder
from backstay.consensus.records.exports import ExportRecord
from backstay.errors import CheckpointDamaged, text_of
from backstay.job_spec import ExportTopicSpec
from backstay.pserver.exports.topic.element_rows import ElementRows
from backstay.pserver.exports.topic.link import TopicLink, Unwanted
from backstay.pserver.exports.topic.messages import TopicProgress
from backstay.pserver.exports.topic.steps import TopicStep, check_run, followed, next_step
from backstay.pserver.metrics.export_figures import ExportCounter

__all__ = ["TopicPublisher"]

# So often the folder is looked at, if nobody tells of a new element.
LOOK_S = 1.0
PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 10.0
# So much of increments one transaction takes: what has gathered while the topic was away.
TOGETHER_BYTES = 64 * 2**20
TOGETHER_MAX = 100
# Manifests that a session keeps in mind.
READ_KEPT = 8
# So long the end waits for the thread: it asks whether it is wanted every second.
CLOSE_S = 5.0

log = logging.getLogger(__name__)


class TopicPublisher:
    """Writes the topic of one export while this node is the controller."""

    def __init__(self, record: ExportRecord, counter: ExportCounter) -> None:
        """Start the thread.

        Args:
            record: The export; it has a topic.
            counter: Is told how the topic does.
        """
        assert record.spec.topic is not None
        self._record = record
        self._topic: ExportTopicSpec = record.spec.topic
        self._counter = counter
        # Of the element whose rows the topic has, if that is of this run.
        self._number = 0
        self._trouble = ""
        self._stop = threading.Event()
        self._news = threading.Event()
        counter.topic(lambda one: one)
        self._thread = threading.Thread(target=self._run, name="backstay-topic", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Tell that there is a new element."""
        self._news.set()

    def has(self, number: int) -> bool:
        """Return whether the topic is at that element, or a later one."""
        return self._number >= number

    async def close(self) -> None:
        """Write no more; give up what is under way."""
        self._stop.set()
        self._news.set()
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    def _run(self) -> None:
        pause_s = PAUSE_FIRST_S
        while not self._stop.is_set():
            before = self._number
            try:
                self._session()
            except Unwanted:
                return
            except _NewSession:
                continue
            except Exception as error:  # noqa: BLE001
                # Whatever the client or a storage raises: it must not end the node.
                self._fail(text_of(error))
                pause_s = PAUSE_FIRST_S if self._number > before else min(2 * pause_s, PAUSE_MAX_S)
                self._stop.wait(pause_s)

    def _session(self) -> None:
        """Write elements until this is not wanted any more.

        Raises:
            BackstayError: Something failed; another session finds out how far this one came.
        """
        record = self._record
        elements = _Elements(ExportFolder(record.spec.url))

        def check(known: TopicProgress | None) -> None:
            check_run(known, record.run, record.started)

        with TopicLink(self._topic, lambda: not self._stop.is_set(), check) as link:
            known = link.progress
            state = followed(known, record.run, elements.read)
            if known is not None and known.run == record.run:
                self._tell(known.element, known.begun)
            while not self._stop.is_set():
                self._news.clear()
                with ExitStack() as stack:
                    rows = self._gather(link, elements, state, stack)
                    if rows:
                        state = self._commit(link, rows)
                self._well()
                if not rows:
                    self._news.wait(LOOK_S)

    def _gather(
        self, link: TopicLink, elements: _Elements, state: Followed | None, stack: ExitStack
    ) -> list[ElementRows]:
        """Return what the next transaction takes, open; nothing if there is nothing new.

        Raises:
            _NewSession: What the topic has must be read, and the last transaction may not be
                readable yet.
        """
        known, run = link.progress, self._record.run
        is_known = known is not None and known.run == run
        not_before = known.begun if known is not None and is_known else 0.0
        names = elements.folder.names()
        rows: list[ElementRows] = []
        size = 0
        while len(rows) < TOGETHER_MAX and size < TOGETHER_BYTES:
            try:
                step = next_step(names, elements.read, state, run, not_before=not_before)
                # What is replaced as a whole begins with what the topic has: it comes alone.
                if step is None or (rows and len(step.replaced)):
                    break
                if len(step.replaced) and link.has_committed:
                    raise _NewSession
                one = elements.open(step, link)
            except CheckpointDamaged:
                if rows:
                    break
                raise
            if one is None:
                continue
            rows.append(stack.enter_context(one))
            size += step.element.total_bytes
            state = step.state
            if len(step.replaced):
                break
        return rows

    def _commit(self, link: TopicLink, rows: list[ElementRows]) -> Followed:
        """Write elements in one transaction; return what the topic has then."""
        record, state = self._record, rows[-1].step.state
        newest = state.newest
        progress = TopicProgress(
            format=1,
            element=newest.id,
            begun=newest.begun,
            chain=newest.chain,
            reason=newest.reason,
            generation=newest.generation,
            export=record.name,
            run=record.run,
            started=record.started,
            cluster=newest.cluster,
            cluster_uid=newest.cluster_uid,
            published=time.time(),
            partitions=link.partitions,
        )
        link.publish(chain.from_iterable(one.messages(link.partitions) for one in rows), progress)
        count = sum(one.written.rows for one in rows)
        gone = sum(one.written.gone for one in rows)
        self._counter.topic(
            lambda one: replace(
                one,
                transactions=one.transactions + 1,
                rows=one.rows + count,
                gone=one.gone + gone,
            )
        )
        self._tell(newest.id, newest.begun)
        if any(len(one.step.replaced) for one in rows):
            log.info(
                "the topic of export %s has %s: %d rows, %d keys without a row",
                *(record.name, newest.id, count, gone),
            )
        return state

    def _tell(self, element: str, begun: float) -> None:
        self._number = number_of(element)
        self._counter.topic(
            lambda one: replace(one, element=element, number=number_of(element), begun=begun)
        )

    def _well(self) -> None:
        if self._trouble:
            log.info("the topic of export %s is written again", self._record.name)
            self._trouble = ""
            self._counter.topic(lambda one: replace(one, trouble=""))

    def _fail(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.error("the topic of export %s: %s", self._record.name, trouble)
            self._trouble = trouble
        self._counter.topic(lambda one: replace(one, trouble=trouble, failed=one.failed + 1))


class _NewSession(Exception):
    """A session must end before what it has written can be read."""


class _Elements:
    """The elements of the folder, as far as a session has looked at them."""

    def __init__(self, folder: ExportFolder) -> None:
        self.folder = folder
        self._read: dict[str, Manifest] = {}
        # Elements whose parts are damaged, with what is wrong.
        self._damaged: dict[str, str] = {}

    def read(self, name: str) -> Manifest | None:
        """Return an element that is whole, or None.

        Raises:
            CheckpointDamaged: Its manifest is damaged, or a part was found to be.
        """
        if name in self._damaged:
            raise CheckpointDamaged(self._damaged[name])
        known = self._read.pop(name, None) or self.folder.read(name)
        if known is not None:
            self._read[name] = known
            if len(self._read) > READ_KEPT:
                del self._read[next(iter(self._read))]
        return known

    def open(self, step: TopicStep, link: TopicLink) -> ElementRows | None:
        """Open the parts of an element; None if one is damaged: another element may do."""
        try:
            return ElementRows(self.folder, step, link.keys)
        except CheckpointDamaged as error:
            self._damaged[step.element.id] = text_of(error)
            return None
