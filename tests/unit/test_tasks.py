"""Background tasks end with their owner, also if they miss a cancellation."""

from __future__ import annotations

import asyncio
import threading

import pytest

from backstay import tasks
from backstay.backoff import Backoff
from backstay.tasks import end_tasks, turns, until_answered


async def _misses_cancellations(count: int) -> None:
    """Go on after so many cancellations, as ``wait_for`` may make a loop do."""
    never = asyncio.Event()
    for _ in range(count):
        try:
            await never.wait()
        except asyncio.CancelledError:
            continue
    await never.wait()


@pytest.mark.parametrize("missed", [0, 1, 3])
def test_a_task_that_misses_a_cancellation_is_cancelled_again(
    missed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "CANCEL_AGAIN_S", 0.01)

    async def scenario() -> None:
        stubborn = asyncio.create_task(_misses_cancellations(missed))
        failed = asyncio.create_task(asyncio.sleep(-1, "done"))
        await asyncio.sleep(0)
        await asyncio.wait_for(end_tasks(stubborn, failed), 30)
        assert stubborn.cancelled()
        assert failed.done()

    asyncio.run(scenario())


def test_there_may_be_no_tasks() -> None:
    async def scenario() -> None:
        other = asyncio.create_task(asyncio.Event().wait())
        await asyncio.wait_for(end_tasks(), 30)
        assert not other.done()
        await end_tasks(other)

    asyncio.run(scenario())


def test_a_loop_that_stands_still_is_told_from_one_that_turns() -> None:
    async def ask() -> tuple[bool, bool]:
        loop = asyncio.get_running_loop()
        turning = await asyncio.to_thread(turns, loop, 10.0)
        found: list[bool] = []
        asker = threading.Thread(target=lambda: found.append(turns(loop, 0.05)))
        asker.start()
        asker.join()  # The loop stands still until the other thread has its answer.
        return turning, found[0]

    assert asyncio.run(ask()) == (True, False)


def test_it_asks_until_there_is_an_answer_and_says_each_new_reason_once() -> None:
    failures = [OSError("a"), OSError("a"), OSError(""), OSError("b")]
    said = []

    async def ask() -> str:
        if failures:
            raise failures.pop(0)
        return "yes"

    answer = asyncio.run(
        until_answered(ask, Backoff(0, 0), OSError, lambda error: said.append(str(error)))
    )
    assert answer == "yes"
    assert said == ["a", "", "b"]


def test_an_error_that_waiting_does_not_cure_is_raised() -> None:
    async def ask() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        asyncio.run(until_answered(ask, Backoff(0, 0), OSError, print))
