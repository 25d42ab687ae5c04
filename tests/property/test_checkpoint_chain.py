"""Any chain of checkpoints is what a dict would be; no damage makes a reader fall over."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from backstay.checkpoint.manifest import new_id
from backstay.checkpoint.parts import PartReader
from backstay.checkpoint.reading import CheckpointReader
from backstay.checkpoint.storage import CheckpointStorage
from backstay.errors import CheckpointDamaged
from tests.examples import examples
from tests.unit.checkpoint_files import (
    ADS,
    FULL,
    SLOT_COUNT,
    Content,
    full_content,
    make_checkpoint,
    of_slots,
    resealed,
)

# Few keys, so that changes meet; spread over all slots.
KEYS = st.integers(0, 23).map(lambda number: number * 0x0ABC_DEF0_1234_5677 % 2**64)
VALUES = st.integers(1, 1000).map(float)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Content, list[int]]:
    """Rows, deleted keys, and the slots that begin anew."""
    rows = draw(st.dictionaries(KEYS, VALUES, max_size=12))
    deleted = draw(st.lists(KEYS, unique=True, max_size=8))
    whole = draw(st.lists(st.integers(0, SLOT_COUNT - 1), unique=True, max_size=2))
    return Content({ADS: rows}, {ADS: deleted} if deleted else {}), whole


@settings(max_examples=examples(40))
@given(st.dictionaries(KEYS, VALUES), st.lists(changes(), max_size=4))
def test_a_chain_is_what_a_dict_would_be(
    first: dict[int, float], later: list[tuple[Content, list[int]]]
) -> None:
    model = dict(first)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        storage = CheckpointStorage(folder / "root")
        newest = make_checkpoint(storage, folder, FULL, Content({ADS: first})).id
        for number, (content, whole) in enumerate(later, start=2):
            checkpoint_id = new_id(number, "0f0f0f")
            make_checkpoint(storage, folder, checkpoint_id, content, base=newest, whole=whole)
            newest = checkpoint_id
            for key in (*content.deleted.get(ADS, ()), *of_slots(list(model), whole)):
                model.pop(key, None)
            model |= content.rows[ADS]
        with CheckpointReader(storage, newest) as reader:
            found = {
                int(key): float(weights[0])
                for rows in reader.rows(ADS.name)
                for key, weights in zip(rows.keys, rows.weights, strict=True)
            }
            assert found == model
            assert reader.row_count(ADS.name) == len(model)


@settings(max_examples=examples(150))
@given(st.data())
def test_no_damage_makes_the_reader_fall_over(data: st.DataObject) -> None:
    # Checksums would find all of these; here the manifest has been made to fit the damage.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        storage = CheckpointStorage(folder / "root")
        manifest = make_checkpoint(storage, folder, FULL, full_content(6))
        path = storage.part_path(FULL, manifest.parts[0].file)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, len(content) - 1))
            content[place] = data.draw(st.integers(0, 255))
        end = data.draw(st.one_of(st.just(len(content)), st.integers(1, len(content))))
        path.write_bytes(content[:end])
        said = ""
        try:
            part = PartReader(path, resealed(storage, manifest, 0), 0)
            part.check_keys()
            for slot in part.slots.tolist():
                part.slot_memory(slot)
                rows = part.rows(ADS.name).of(slot)
                assert len(rows.keys) == len(rows.weights) == len(rows.state)
        except CheckpointDamaged as error:
            said = str(error)
        assert not said or said.startswith(f"{FULL}/{path.name}: ")
