"""What a node counts of the running exports that it writes as the controller.

Written by the event loop and by the threads that write topics; read by the thread that answers a
scrape. Each export's figures are replaced whole. It imports nothing but the standard library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["ExportCounter", "ExportFigures", "ExportsFigures", "TopicFigures"]


@dataclass(frozen=True)
class TopicFigures:
    """How the topic of an export does.

    Attributes:
        element: Whose rows it has; empty: none yet.
        number: Of that element.
        begun: Unix time at which that was begun; 0: there is none.
        trouble: Why it could not be written last; empty: it was.
        transactions: That were written.
        failed: Tries that failed.
        rows: Rows that were written.
        gone: Keys whose row had vanished.
    """

    element: str = ""
    number: int = 0
    begun: float = 0.0
    trouble: str = ""
    transactions: int = 0
    failed: int = 0
    rows: int = 0
    gone: int = 0


@dataclass(frozen=True)
class ExportFigures:
    """What this node did for one export since it is the controller.

    Attributes:
        number: Of the newest whole element; 0: none.
        begun: Unix time at which the newest one was begun; 0: there is none.
        written: Elements, by kind.
        failed: Tries that failed.
        rows: Rows in those elements.
        bytes: Of their parts.
        topic: How its topic does; None: it has none.
    """

    number: int = 0
    begun: float = 0.0
    written: Mapping[str, int] = field(default_factory=lambda: {"base": 0, "increment": 0})
    failed: int = 0
    rows: int = 0
    bytes: int = 0
    topic: TopicFigures | None = None

    @property
    def topic_behind_s(self) -> float:
        """How much later the newest element was begun than the topic's; 0: it has none."""
        if self.topic is None or not self.topic.begun:
            return 0.0
        return max(self.begun - self.topic.begun, 0.0)


class ExportsFigures:
    """The figures of all exports that this node writes now. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, ExportFigures] = {}

    def all(self) -> Mapping[str, ExportFigures]:
        """Return them as they are now, by the export's name."""
        with self._lock:
            return dict(self._known)

    def begin(self, name: str) -> ExportCounter:
        """Begin to count for an export."""
        with self._lock:
            self._known[name] = ExportFigures()
        return ExportCounter(name, self._change)

    def end(self, name: str) -> None:
        """Forget an export that this node writes no more."""
        with self._lock:
            self._known.pop(name, None)

    def to_object(self) -> dict[str, Any]:
        """Return what other nodes are told of topics, as a JSON object."""
        return {
            name: {
                "element": one.topic.element,
                "begun": one.topic.begun,
                "behind_s": one.topic_behind_s,
                "trouble": one.topic.trouble,
            }
            for name, one in self.all().items()
            if one.topic is not None
        }

    def _change(self, name: str, change: Callable[[ExportFigures], ExportFigures]) -> None:
        with self._lock:
            if name in self._known:
                self._known[name] = change(self._known[name])


class ExportCounter:
    """Counts for one export. From any thread."""

    def __init__(
        self,
        name: str,
        change: Callable[[str, Callable[[ExportFigures], ExportFigures]], None],
    ) -> None:
        self._name = name
        self._change = change

    def known(self, number: int, begun: float) -> None:
        """Note the newest element of an export that others have written so far."""
        self._change(self._name, lambda one: replace(one, number=number, begun=begun))

    def written(self, kind: str, number: int, begun: float, rows: int, size_bytes: int) -> None:
        """Count a whole element."""
        self._change(
            self._name,
            lambda one: replace(
                one,
                number=max(one.number, number),
                begun=max(one.begun, begun),
                written={**one.written, kind: one.written[kind] + 1},
                rows=one.rows + rows,
                bytes=one.bytes + size_bytes,
            ),
        )

    def failed(self) -> None:
        """Count a try that failed."""
        self._change(self._name, lambda one: replace(one, failed=one.failed + 1))

    def topic(self, change: Callable[[TopicFigures], TopicFigures]) -> None:
        """Note how the topic does."""
        self._change(
            self._name, lambda one: replace(one, topic=change(one.topic or TopicFigures()))
        )
