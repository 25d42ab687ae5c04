"""Storage that stands still holds up checkpoints, and nothing else."""

from __future__ import annotations

import asyncio
import threading

from backstay.pserver.snapshots.disk import THREADS, in_disk_thread

LIMIT_S = 10.0


def test_storage_that_stands_still_leaves_threads_for_decisions() -> None:
    stands_still = threading.Event()

    async def scenario() -> None:
        # More than the event loop has threads of its own.
        waiting = [
            asyncio.ensure_future(in_disk_thread(stands_still.wait)) for _ in range(10 * THREADS)
        ]
        try:
            assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), LIMIT_S) == 7
            assert not any(one.done() for one in waiting)
        finally:
            stands_still.set()
        assert all(await asyncio.gather(*waiting))

    asyncio.run(scenario())
