"""Alerts about the figures of windows: which of them hold, and whether one ends the job.

An alert holds when its figure was beyond its limits in so many windows in a row. Imports the job's
spec; does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from backstay.job_spec import AlertSpec

__all__ = ["Alerts"]

log = logging.getLogger(__name__)


@dataclass
class _Alert:
    """An alert, and how it stands.

    Attributes:
        spec: What is watched.
        windows: In how many windows in a row its figure was beyond its limits.
        value: The figure of the last one of them.
    """

    spec: AlertSpec
    windows: int = 0
    value: float = 0.0

    @property
    def holds(self) -> bool:
        return self.windows >= self.spec.for_windows

    @property
    def words(self) -> str:
        """Return what is wrong, for people."""
        unit = "window" if self.windows == 1 else "windows"
        return f"{self.spec.text} for {self.windows} {unit} ({self.value:.6g} in the last)"


class Alerts:
    """The alerts of a job.

    Args:
        specs: What is watched.
    """

    def __init__(self, specs: Iterable[AlertSpec]) -> None:
        self._alerts = [_Alert(spec) for spec in specs]

    @property
    def words(self) -> list[str]:
        """Those that hold, for people."""
        return [alert.words for alert in self._alerts if alert.holds]

    def judge(self, window: Mapping[str, Any]) -> str:
        """Hold each alert against a window; return why the job is to stop, empty: it is not.

        Args:
            window: Its number, and figures by name below ``window`` and ``decayed``.
        """
        stop = ""
        for alert in self._alerts:
            value = window[alert.spec.over][alert.spec.metric]
            if value is None:
                # Nothing is known of it in this window.
                continue
            held = alert.holds
            alert.windows = alert.windows + 1 if alert.spec.is_bad(value) else 0
            alert.value = value
            if alert.holds and not held:
                log.warning("alert in window %d: %s", window["number"], alert.words)
                if alert.spec.action == "stop":
                    stop = stop or f"alert: {alert.words}"
        return stop

    def begin_stops_anew(self) -> None:
        """Forget the windows of alerts that stop the job.

        Who starts it again wants to see new windows first.
        """
        for alert in self._alerts:
            if alert.spec.action == "stop":
                alert.windows = 0

    def recorded(self) -> dict[str, tuple[int, float]]:
        """Return how they stand, by their texts; ``take`` takes it."""
        return {one.spec.text: (one.windows, one.value) for one in self._alerts if one.windows}

    def take(self, recorded: Mapping[str, tuple[int, float]]) -> None:
        """Go on with what is recorded; an alert of which nothing is begins anew."""
        for alert in self._alerts:
            alert.windows, alert.value = recorded.get(alert.spec.text, (0, 0.0))
