"""In which state each task of a round is: to do, held, done or parked. Imports ``task_bits``."""

from __future__ import annotations

from backstay.master.core.task_bits import TaskBits

__all__ = ["DONE", "HELD", "PARKED", "TODO", "TaskStates"]

TODO, HELD, DONE, PARKED = range(4)


class TaskStates:
    """A byte for each task. A task that is done stays so."""

    def __init__(self, done: TaskBits) -> None:
        """Begin with the tasks that are done; the others are to do."""
        self._states = bytearray((done.to_array() * DONE).tobytes())
        self.held = 0

    def __getitem__(self, task: int) -> int:
        """Return a task's state."""
        return self._states[task]

    def hold(self, task: int) -> None:
        """Somebody holds a task that was to do, or is held already."""
        if self._states[task] == TODO:
            self._states[task] = HELD
            self.held += 1

    def release(self, task: int) -> None:
        """Nobody holds a task any more: if it was held, it is to do."""
        if self._states[task] == HELD:
            self._states[task] = TODO
            self.held -= 1

    def finish(self, task: int) -> None:
        """A task is done, whatever it was."""
        self.release(task)
        self._states[task] = DONE

    def park(self, task: int) -> None:
        """A task is parked, whatever it was."""
        self.release(task)
        self._states[task] = PARKED

    def unpark(self, task: int) -> None:
        """A parked task is to do again."""
        self._states[task] = TODO
