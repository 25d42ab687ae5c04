"""Which alerts hold after which windows, and which of them ends a job."""

from __future__ import annotations

from typing import Any

from backstay.job_engine.alerts import Alerts
from backstay.job_spec import AlertSpec

LOW = AlertSpec(metric="auc", below=0.7, for_windows=2)
HIGH = AlertSpec(metric="calibration", above=1.5, over="decayed", action="stop")


def window(number: int, *, auc: float | None = 0.9, calibration: float | None = 1.0) -> Any:
    return {"number": number, "window": {"auc": auc}, "decayed": {"calibration": calibration}}


def test_an_alert_holds_after_its_windows_in_a_row() -> None:
    alerts = Alerts([LOW])
    for number, (auc, holds) in enumerate([(0.6, 0), (0.8, 0), (0.6, 0), (0.5, 1), (0.7, 0)]):
        assert alerts.judge(window(number, auc=auc)) == ""
        assert len(alerts.words) == holds
    alerts.judge(window(9, auc=0.6))
    alerts.judge(window(10, auc=None))
    alerts.judge(window(11, auc=0.5))
    assert alerts.words == ["auc below 0.7 for 2 windows (0.5 in the last)"]


def test_the_first_window_in_which_a_stopping_alert_holds_ends_the_job() -> None:
    alerts = Alerts([LOW, HIGH])
    why = alerts.judge(window(1, auc=0.1, calibration=2.0))
    assert why == "alert: decayed calibration above 1.5 for 1 window (2 in the last)"
    assert alerts.judge(window(2, auc=0.1, calibration=2.0)) == "", "it held before"
    alerts.begin_stops_anew()
    assert [words.partition(" ")[0] for words in alerts.words] == ["auc"]
    assert alerts.judge(window(3, calibration=2.0)) == why


def test_what_is_recorded_is_taken_by_the_text_of_an_alert() -> None:
    alerts, again = Alerts([LOW, HIGH]), Alerts([HIGH, LOW])
    alerts.judge(window(1, auc=0.1))
    assert alerts.recorded() == {"auc below 0.7": (1, 0.1)}
    again.judge(window(1, calibration=9.0))
    again.take(alerts.recorded())
    assert again.words == []
    again.judge(window(2, auc=0.2))
    assert again.words == ["auc below 0.7 for 2 windows (0.2 in the last)"]
