"""Checkpoints that the simulation keeps, and restores from them at random moments.

Files are not simulated: a checkpoint is what ``save_slot`` gave for every slot within one moment,
with what every key counted then. Nodes load their slots late, one by one, so that everything may
happen in between. It draws from random numbers of its own: other runs of a seed stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from backstay._native import SimSlot
from backstay.consensus.records import RoutingTable
from backstay.consensus.records.checkpoints import CheckpointRecord, RestorePlan
from backstay.consensus.store import Put, Txn
from tests.sim.events import MS, Micros

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.pserver import Pserver

__all__ = ["NEWEST", "RESTORE", "SAVE_EVERY", "URL", "Checkpoints", "SavedSlot"]

RESTORE, NEWEST = "plans/restore", "checkpoint"
URL = "/ckpt"
SAVE_EVERY = 120 * MS
RESTORE_EVERY = 600 * MS
LOAD_LIMIT = 60 * MS


@dataclass(frozen=True)
class SavedSlot:
    """A slot as a checkpoint has it: copies, oldest first, and what its keys counted."""

    chain: tuple[SimSlot, ...]
    counts: tuple[int, ...]


class Checkpoints:
    """What was saved, by id."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        """Begin to save and to restore."""
        self._cluster = cluster
        self._random = Random(f"checkpoints {seed}")
        self.restores_lost = self._random.random() < 0.5
        # Whether only what was lost comes back, and all else goes on.
        self.lost_only = Random(f"lost only {seed}").random() < 0.5
        # Restores of some slots only are asked for, too.
        self._some_slots = True
        self._saved: list[dict[int, SavedSlot]] = []
        # What each slot that was restored counts at least, by the checkpoint of its last epoch.
        self._least: dict[int, tuple[int, ...]] = {}
        self._loading: set[tuple[int, int, int]] = set()
        self._later(SAVE_EVERY, self._save)
        self._later(RESTORE_EVERY, self._restore)

    def _later(self, limit: Micros, what: Callable[[], None]) -> None:
        self._cluster.queue.after(self._random.randrange(MS, limit), what)

    def _put(self, key: str, text: str) -> None:
        store = self._cluster.store
        if store.is_up:
            store.state.transact(Txn((), (Put(key, text),)))
            store.changed()

    def _save(self) -> None:
        """Save every slot at one moment, if each has a master that surely is one."""
        cluster = self._cluster
        if cluster.trainers[0].stopping:
            return
        self._later(SAVE_EVERY, self._save)
        found = {slot: self._save_slot(slot) for slot in range(cluster.options.slots)}
        saved = {slot: one for slot, one in found.items() if one is not None}
        if len(saved) == len(found):
            self._saved.append(saved)
            cluster.queue.counts["checkpoints"] += 1
            self._put(NEWEST, CheckpointRecord(URL, self._name(len(self._saved)), "").to_json())

    def _save_slot(self, slot: int) -> SavedSlot | None:
        before = self._saved[-1][slot].chain if self._saved else ()
        base = (before[-1].position, before[-1].epoch) if before else None
        for process in self._cluster.processes.values():
            if not process.is_alive or process.is_paused:
                continue
            copy = process.native.save_slot(process.clock.now(), slot, base)
            if copy is not None:
                chain = (copy,) if copy.whole else (*before, copy)
                return SavedSlot(chain, self._counts(process, slot))
        return None

    def _counts(self, process: Pserver, slot: int) -> tuple[int, ...]:
        keys = self._cluster.keys_of.get(slot, [])
        return tuple(round(one) for one in process.native.peek(self._cluster.table, keys))

    @staticmethod
    def _name(number: int) -> str:
        return f"ckpt-{number:06d}-abcdef"

    def _restore(self) -> None:
        """Ask for a restore of any checkpoint, of all slots or of some, whatever is under way."""
        cluster = self._cluster
        if cluster.trainers[0].stopping:
            return
        self._later(RESTORE_EVERY, self._restore)
        if self._saved and cluster.routings:
            number = self._random.randrange(1, len(self._saved) + 1)
            some = self._some_slots and self._random.random() < 0.4
            slots = self._random.sample(range(cluster.options.slots), 2) if some else ()
            plan = RestorePlan(URL, self._name(number), tuple(sorted(slots)))
            cluster.queue.counts["restores"] += 1
            self._put(RESTORE, plan.to_json())

    def restore_all(self) -> bool:
        """Ask for a restore of all slots, as people do; returns whether it could be asked for."""
        cluster = self._cluster
        if not (self._saved and cluster.routings and cluster.store.is_up):
            return False
        plan = RestorePlan(URL, self._name(self._random.randrange(1, len(self._saved) + 1)))
        cluster.queue.counts["restores"] += 1
        self._put(RESTORE, plan.to_json())
        return True

    def new_epoch(self, routing: RoutingTable, slot: int) -> None:
        """A slot has begun anew, from a checkpoint or empty."""
        self._least.pop(slot, None)
        if slot in routing.restoring.slots:
            number = int(routing.restoring.checkpoint.split("-")[1])
            self._least[slot] = self._saved[number - 1][slot].counts

    def look(self, process: Pserver, version: int) -> None:
        """Let a process load, some time later, what its routing table asks it for."""
        for slot, epoch in process.native.to_load() if version else ():
            if (process.instance, slot, epoch) not in self._loading:
                self._loading.add((process.instance, slot, epoch))
                source = self._cluster.routings[version - 1].restoring.checkpoint
                load = partial(self._load, process, slot, epoch, source)
                self._later(LOAD_LIMIT, partial(process.handle, load))

    def _load(self, process: Pserver, slot: int, epoch: int, source: str) -> None:
        saved = self._saved[int(source.split("-")[1]) - 1][slot]
        self._loading.discard((process.instance, slot, epoch))
        if process.native.load_slot(process.clock.now(), slot, epoch, list(saved.chain)):
            self._cluster.queue.counts["slots_loaded"] += 1
            if self._counts(process, slot) != saved.counts:
                self._cluster.fail(f"slot {slot} is not loaded as {source} has it")

    def check_final(self, where: str, slot: int, counts: list[int]) -> None:
        """A restored slot has at least what it was restored from."""
        for count, least in zip(counts, self._least.get(slot, ()), strict=False):
            if count < least:
                self._cluster.fail(f"{where} counts {count} in slot {slot}; restored was {least}")
