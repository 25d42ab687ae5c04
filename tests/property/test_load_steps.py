"""Which files of a chain of checkpoints a node reads, for which slots."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backstay.checkpoint.manifest import Manifest, Part, SlotEntries
from backstay.pserver.checkpoints.loading import load_steps

SLOTS = 8
PARTS = 3


def manifest(number: int, parts: list[int], whole: list[bool]) -> Manifest:
    full = all(whole)
    zeros = np.zeros(SLOTS, dtype=np.uint64)
    return Manifest(
        id=f"ckpt-{number:06d}-abcdef",
        base=None if full else f"ckpt-{number - 1:06d}-abcdef",
        cluster="demo",
        cluster_uid="ab",
        begun=0.0,
        routing_version=1,
        generation=0,
        tables=(),
        parts=tuple(
            Part(f"part-{index:08x}-0000.safetensors", 1, "0" * 64) for index in range(PARTS)
        ),
        slots=SlotEntries(
            part=np.array([*range(PARTS), *parts]),
            position=zeros,
            epoch=zeros,
            whole=np.array(whole),
            rows=zeros,
        ),
    )


@given(
    links=st.lists(
        st.tuples(
            st.lists(st.integers(0, PARTS - 1), min_size=SLOTS - PARTS, max_size=SLOTS - PARTS),
            st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS),
        ),
        min_size=1,
        max_size=5,
    ),
    wanted=st.sets(st.integers(0, SLOTS - 1), min_size=1),
)
def test_each_slot_is_read_from_the_newest_that_has_it_whole_on(
    links: list[tuple[list[int], list[bool]]], wanted: set[int]
) -> None:
    chain = [manifest(1, links[0][0], [True] * SLOTS)]
    for number, (parts, whole) in enumerate(links[1:], start=2):
        # One that is whole would begin a chain of its own.
        chain.append(manifest(number, parts, [*whole[:-1], False]))
    read: dict[int, list[int]] = {slot: [] for slot in wanted}
    for at, steps in enumerate(load_steps(chain, sorted(wanted))):
        assert len({step.part for step in steps}) == len(steps)
        for step in steps:
            assert step.manifest is chain[at]
            assert step.last == (at == len(chain) - 1)
            for slot, is_whole in zip(step.slots, step.whole, strict=True):
                assert int(chain[at].slots.part[slot]) == step.part
                assert bool(chain[at].slots.whole[slot]) == is_whole
                read[slot].append(at)
    for slot, links_read in read.items():
        first = max(at for at, one in enumerate(chain) if one.slots.whole[slot])
        assert links_read == list(range(first, len(chain)))
