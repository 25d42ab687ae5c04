"""What the master is told of a task that failed: the error in words, and the records concerned.

Pure. May import the feed and the model definition.
"""

from __future__ import annotations

from backstay.errors import BackstayError
from backstay.job.messages import BadRecordsMet
from backstay.job.model_definition import ModelDefinition, is_users, user_traceback
from backstay.trainer.worker.leased_work import LeasedWork
from backstay.trainer.worker.task_feed import FeedFailed, TaskFeed

__all__ = ["bad_records_of", "failure_report"]

PLACES_MAX = 100
PLACES_NAMED = 10


def failure_report(
    work: LeasedWork, error: Exception, definition: ModelDefinition
) -> tuple[str, list[int]]:
    """Return the error in words, and positions within the task of the records concerned."""
    places = getattr(error, "backstay_places", ())
    cause = error
    if isinstance(error, FeedFailed):
        places = error.places
        assert isinstance(error.__cause__, Exception)
        cause = error.__cause__
    if isinstance(cause, BackstayError) and not is_users(cause, definition.path):
        text = f"{type(cause).__name__}: {cause}"
    else:
        text = user_traceback(cause, definition.path)
    named = [int(place) for place in places[:PLACES_MAX]]
    if named:
        numbers = ", ".join(str(work.task.start + place) for place in named[:PLACES_NAMED])
        more = ", ..." if len(places) > PLACES_NAMED else ""
        text += f"\nrecords of {work.task.shard}: {numbers}{more}"
    return text, named


def bad_records_of(feed: TaskFeed | None) -> BadRecordsMet:
    """Return the damaged records of a feed as the master is told of them."""
    if feed is None:
        return BadRecordsMet()
    reports = feed.bad.reports
    return BadRecordsMet(
        feed.bad.count, tuple((one.file, one.offset, one.reason) for one in reports)
    )
