"""The numbers of workers and servers over random clusters: within bounds, and at rest in the end.

A model beside the rules has room for so many Pods, places those that wait in an order of its own
choice, and makes up what the workers train and what the rows take.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from backstay.job_engine.scaling import ScalingNotes, ScalingPolicy, Seen, decide
from tests.examples import examples

LOOK_MS = 2000
LOOKS = 1500
# After so many looks in the same cluster nothing changes any more.
LOOKS_UNTIL_REST = 1000
CHANGES_MAX = 60
ENDING_LOOKS = 3


@dataclass
class World:
    """A cluster with one job."""

    policy: ScalingPolicy
    workers: int
    servers: int
    room: int
    server_size: int
    workers_first: bool
    rows: float
    examples: list[float]
    lent: int = 0
    placed: int = 0
    serving: int = 0
    now_ms: int = 0
    ending: list[int] = field(default_factory=list)
    notes: ScalingNotes = field(default_factory=ScalingNotes)
    changes: int = 0

    @property
    def free(self) -> int:
        used = self.placed + len(self.ending) + self.serving * self.server_size
        return self.room - used

    def look(self) -> bool:
        """Go on by one look; return whether something was decided."""
        self.now_ms += LOOK_MS
        self.ending = [one - 1 for one in self.ending if one > 1]
        self._place()
        seen = Seen(
            now_ms=self.now_ms,
            workers=self.workers,
            lent=self.lent,
            placed=self.placed,
            waiting=self.workers - self.placed,
            ending=len(self.ending),
            working=self.placed,
            examples_per_s=self.examples[min(self.placed, len(self.examples) - 1)],
            is_training=True,
            servers=self.servers,
            serving=self.serving,
            servers_waiting=self.servers - self.serving,
            memory_share=self.rows / self.serving if self.serving else None,
        )
        self.notes, decision = decide(self.policy, self.notes, seen)
        if decision is None:
            return False
        policy = self.policy
        assert policy.workers_least <= decision.workers <= policy.workers_most
        assert decision.lent >= 0
        assert policy.servers_least <= decision.servers <= policy.servers_most
        assert decision[:3] != (self.workers, self.lent, self.servers)
        assert decision.reason
        # Nothing else grows while a server finds no room, unless no worker could help.
        if self.servers > self.serving and not self.notes.is_in_vain:
            assert decision.workers < self.workers
        self.changes += 1
        gone = max(0, self.placed - decision.workers)
        self.placed -= gone
        self.ending += [ENDING_LOOKS] * gone
        self.serving = min(self.serving, decision.servers)
        self.workers, self.lent, self.servers = decision[:3]
        return True

    def _place(self) -> None:
        def workers() -> None:
            self.placed += max(0, min(self.workers - self.placed, self.free))

        def servers() -> None:
            fit = max(0, self.free) // self.server_size
            self.serving += min(self.servers - self.serving, fit)

        for place in (workers, servers) if self.workers_first else (servers, workers):
            place()


@st.composite
def worlds(draw: st.DrawFn) -> World:
    least = draw(st.integers(0, 3))
    most = draw(st.integers(max(1, least), 12))
    servers_least = draw(st.integers(1, 3))
    servers_most = draw(st.integers(servers_least, 6))
    policy = ScalingPolicy(
        workers=draw(st.sampled_from(["fixed", "fill", "throughput"])),
        servers=draw(st.sampled_from(["fixed", "load"])),
        gain=draw(st.floats(0.0, 1.0)),
        load_low=draw(st.floats(0.0, 0.5)),
        load_high=draw(st.floats(0.51, 1.0)),
        cool_down_ms=draw(st.sampled_from([4000, 20_000, 60_000])),
        workers_least=least,
        workers_most=most,
        servers_least=servers_least,
        servers_most=servers_most,
    )
    return World(
        policy,
        workers=draw(st.integers(least, most)),
        servers=draw(st.integers(servers_least, servers_most)),
        room=draw(st.integers(0, 30)),
        server_size=draw(st.integers(1, 4)),
        workers_first=draw(st.booleans()),
        rows=draw(st.floats(0.0, 6.0)),
        examples=sorted(draw(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=13))),
    )


@settings(max_examples=examples(60))
@given(world=worlds(), other_room=st.integers(0, 30))
def test_numbers_stay_in_bounds_and_come_to_rest(world: World, other_room: int) -> None:
    for room in (world.room, other_room):
        # Pods that run stay where they are.
        used = world.placed + world.serving * world.server_size
        world.room = max(room, used)
        world.changes = 0
        decided = [world.look() for _ in range(LOOKS)]
        assert world.changes <= CHANGES_MAX
        assert not any(decided[LOOKS_UNTIL_REST:])
        # Nobody's room is kept for a server that does not need it.
        assert world.lent == 0 or world.servers > world.serving


@settings(max_examples=examples(60))
@given(world=worlds())
def test_a_server_gets_its_room_and_the_workers_come_back(world: World) -> None:
    policy = replace(world.policy, workers="fixed", servers="fixed", servers_least=1)
    world.policy = policy
    wanted, floor = world.workers, max(1, policy.workers_least)
    world.workers_first = True
    for _ in range(LOOKS):
        world.look()
    fits = (world.room - min(floor, wanted)) // world.server_size
    assert world.serving >= min(world.servers, max(0, fits))
    world.room += 100
    for _ in range(LOOKS):
        world.look()
    assert (world.workers, world.lent, world.placed) == (wanted, 0, wanted)
    assert world.serving == world.servers


@settings(max_examples=examples(60))
@given(world=worlds())
def test_fill_takes_all_the_room_that_there_is(world: World) -> None:
    policy = replace(world.policy, workers="fill", servers="fixed")
    world.policy, world.servers, world.serving = policy, 0, 0
    world.policy = replace(policy, servers_least=0)
    for _ in range(LOOKS):
        world.look()
    assert world.placed == min(world.room, policy.workers_most)
    # One may wait for more.
    assert world.workers <= max(policy.workers_least, world.placed + 1)


@settings(max_examples=examples(200))
@given(
    rows=st.floats(0.0, 8.0),
    servers=st.integers(1, 8),
    load_low=st.floats(0.0, 0.7),
    load_high=st.floats(0.71, 1.0),
)
def test_servers_come_to_rest_where_their_load_is_right(
    rows: float, servers: int, load_low: float, load_high: float
) -> None:
    policy = ScalingPolicy(
        servers="load",
        load_low=load_low,
        load_high=load_high,
        cool_down_ms=LOOK_MS,
        servers_least=1,
        servers_most=8,
    )
    notes, count, changed = ScalingNotes(), servers, 0
    for look in range(100):
        seen = Seen(look * LOOK_MS, workers=1, placed=1, servers=count, serving=count)
        notes, decision = decide(policy, notes, replace(seen, memory_share=rows / count))
        if decision is not None:
            assert 1 <= decision.servers <= 8
            # Up, or down, and never back.
            assert (decision.servers > count) == (rows / count > load_high)
            count, changed = decision.servers, changed + 1
    assert changed <= 7
    assert rows / count <= load_high or count == 8
    assert count == 1 or rows / (count - 1) >= load_low
