"""Rows of a chain of checkpoints, put together; and what verification says of damage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backstay.checkpoint.catalogue import catalogue
from backstay.checkpoint.manifest import MANIFEST_FILE, SlotEntries
from backstay.checkpoint.reading import CheckpointReader, block_count
from backstay.checkpoint.storage import CheckpointStorage
from backstay.checkpoint.verification import verify
from backstay.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest
from backstay.tables import Adagrad, Dense, TableSpec, Uniform
from backstay.trainer.table import Table
from tests.unit.checkpoint_files import (
    ADS,
    FULL,
    LAYER,
    SECOND,
    SLOT_COUNT,
    THIRD,
    Content,
    full_content,
    layer_key,
    make_checkpoint,
    of_slots,
)


@pytest.fixture
def storage(tmp_path: Path) -> CheckpointStorage:
    return CheckpointStorage(tmp_path / "root")


def rows_of(reader: CheckpointReader, table: TableSpec) -> dict[int, float]:
    """What each key's row is filled with."""
    found: dict[int, float] = {}
    for rows in reader.rows(table.name):
        for key, weights, state in zip(rows.keys, rows.weights, rows.state, strict=True):
            assert int(key) not in found
            assert set(weights.tolist()) == {weights[0]}
            assert set(state.tolist()) <= {-weights[0]}
            found[int(key)] = float(weights[0])
    return found


def replace_manifest(storage: CheckpointStorage, checkpoint_id: str, **changes: object) -> None:
    """Write another manifest in place of the one that is there."""
    changed = replace(storage.read_manifest(checkpoint_id), **changes)  # type: ignore[arg-type]
    path = Path(storage.url) / checkpoint_id / MANIFEST_FILE
    path.write_text(changed.to_json(), encoding="utf-8")


def test_a_full_checkpoint(storage: CheckpointStorage, tmp_path: Path) -> None:
    make_checkpoint(storage, tmp_path, FULL, full_content())
    with CheckpointReader(storage, FULL) as reader:
        assert rows_of(reader, ADS) == full_content().rows[ADS]
        assert reader.row_count(ADS.name) == 40
        assert reader.slot_memory(5).position == 10
        np.testing.assert_array_equal(
            reader.dense(LAYER.name).reshape(-1), np.repeat([0.0, 1.0, 2.0, 3.0], 4)[:15]
        )
        with pytest.raises(InvalidRequest, match="no table"):
            reader.row_count("none")
        with pytest.raises(InvalidRequest, match="is sparse"):
            reader.dense(ADS.name)
        with pytest.raises(InvalidRequest, match="slot 8"):
            reader.slot_rows(ADS.name, 8)


def test_a_chain_is_merged_as_the_format_page_says(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    make_checkpoint(storage, tmp_path, FULL, full_content())
    expected: dict[int, float] = dict(full_content().rows[ADS])
    keys = sorted(expected)
    # Changed, new, deleted; deleted and put again; and one slot that begins anew.
    new = 2**63 + 12345
    second: Mapping[int, float] = {keys[0]: 100.0, new: 101.0, keys[4]: 102.0}
    gone = [keys[1], keys[4], keys[2]]
    fresh = of_slots(keys, [3])
    assert len(fresh) > 1
    second = {**second, fresh[0]: 103.0}
    make_checkpoint(
        storage,
        tmp_path,
        SECOND,
        Content({ADS: second, LAYER: {layer_key(2): 7.0}}, {ADS: gone}),
        base=FULL,
        whole=[3],
    )
    make_checkpoint(
        storage, tmp_path, THIRD, Content({ADS: {keys[2]: 200.0}}, {ADS: [new]}), base=SECOND
    )
    for key in (*gone, *fresh):
        expected.pop(key, None)
    expected |= second
    with CheckpointReader(storage, SECOND) as reader:
        assert rows_of(reader, ADS) == expected
    expected.pop(new)
    expected[keys[2]] = 200.0
    with CheckpointReader(storage, THIRD) as reader:
        assert rows_of(reader, ADS) == expected
        assert [each.id for each in reader.chain] == [FULL, SECOND, THIRD]
        assert reader.slot_memory(0).position == 30
        assert (
            reader.dense(LAYER.name).reshape(-1).tolist() == [0] * 4 + [1] * 4 + [7] * 4 + [3] * 3
        )
    assert verify(storage, THIRD).ok


def test_a_table_that_is_younger_than_the_base(storage: CheckpointStorage, tmp_path: Path) -> None:
    young = TableSpec.sparse("young", 2, optimizer=Adagrad(0.1))
    make_checkpoint(storage, tmp_path, FULL, full_content())
    make_checkpoint(
        storage, tmp_path, SECOND, Content({young: {5: 1.0}}), base=FULL, tables=(ADS, LAYER, young)
    )
    with CheckpointReader(storage, SECOND) as reader:
        assert rows_of(reader, young) == {5: 1.0}
        assert rows_of(reader, ADS) == full_content().rows[ADS]


def test_blocks_that_nobody_set_have_their_initial_values(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    spec = TableSpec.dense("layer.w", (5, 3), block_elements=4, initializer=Uniform(2.0, 3.0))
    content = Content({spec: {layer_key(1): 1.0}})
    make_checkpoint(storage, tmp_path, FULL, content, tables=(spec,))
    with CheckpointReader(storage, FULL) as reader:
        flat = reader.dense("layer.w").reshape(-1)
    assert flat[4:8].tolist() == [1.0] * 4
    rest = np.delete(flat, np.s_[4:8])
    assert ((rest >= 2.0) & (rest <= 3.0)).all()
    assert len(np.unique(rest)) == 11


def test_a_block_beyond_the_end_is_refused(storage: CheckpointStorage, tmp_path: Path) -> None:
    make_checkpoint(storage, tmp_path, FULL, Content({LAYER: {layer_key(4): 1.0}}))
    with CheckpointReader(storage, FULL) as reader, pytest.raises(CheckpointDamaged, match="of 4"):
        reader.dense(LAYER.name)


@pytest.mark.parametrize("shape", [(5, 3), (4,), (1,), (4097,)])
def test_blocks_have_the_keys_that_trainers_give_them(shape: tuple[int, ...]) -> None:
    spec = replace(LAYER, kind=Dense(shape, 4))
    keys = Table.of(spec).block_keys().tolist()
    assert keys == [layer_key(block) for block in range(block_count(spec))]


# -- chains that do not fit ----------------------------------------------------------------


@pytest.fixture
def chain(storage: CheckpointStorage, tmp_path: Path) -> CheckpointStorage:
    """A full checkpoint and two on it."""
    make_checkpoint(storage, tmp_path, FULL, full_content())
    make_checkpoint(storage, tmp_path, SECOND, Content({ADS: {1: 1.0}}), base=FULL)
    make_checkpoint(storage, tmp_path, THIRD, Content({ADS: {2: 2.0}}), base=SECOND)
    return storage


def test_a_missing_base_is_named(chain: CheckpointStorage) -> None:
    chain.delete(FULL)
    with pytest.raises(CheckpointDamaged, match=f"{SECOND} builds on {FULL}, which is missing"):
        chain.chain(THIRD)
    report = verify(chain, THIRD)
    assert not report.ok
    assert (report.files[0].checkpoint, report.files[0].verdict) == (FULL, "missing")
    with pytest.raises(CheckpointNotFound, match=FULL):
        verify(chain, FULL)


def test_a_cycle_in_bases_is_refused(chain: CheckpointStorage) -> None:
    # No Manifest can be made that closes it: the file is written by hand.
    path = Path(chain.url) / SECOND / MANIFEST_FILE
    from backstay.checkpoint.documents import parse_object, write_object

    document = parse_object(path.read_bytes())
    document["base"] = THIRD
    path.write_text(write_object(document), encoding="utf-8")
    with pytest.raises(CheckpointDamaged, match=f"{SECOND}/manifest.json: base {THIRD} is not"):
        chain.chain(THIRD)


def test_two_checkpoints_with_one_manifest_are_told_apart(chain: CheckpointStorage) -> None:
    root = Path(chain.url)
    (root / SECOND / MANIFEST_FILE).write_bytes((root / FULL / MANIFEST_FILE).read_bytes())
    with pytest.raises(CheckpointDamaged, match=f"{SECOND}/manifest.json: .* manifest of {FULL}"):
        chain.read_manifest(SECOND)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cluster_uid": "ffff"}, "of another cluster"),
        ({"tables": (replace(ADS, seed=1), LAYER)}, "other settings of table 'ads/user'"),
        ({"slots": "epoch"}, "another epoch of slot 0"),
        ({"slots": "position"}, "another epoch of slot 0"),
        ({"slots": "fewer"}, "has 4 slots, not 8"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(
    chain: CheckpointStorage, changes: dict[str, object], reason: str
) -> None:
    slots = chain.read_manifest(SECOND).slots
    other = {
        "epoch": replace(slots, epoch=slots.epoch + np.uint64(1)),
        "position": replace(slots, position=slots.position - np.uint64(11)),
        "fewer": SlotEntries(
            **{name: np.array(some[:4]) for name, some in slots.to_lists().items()}
        ),
    }
    if "slots" in changes:
        changes = {"slots": other[str(changes["slots"])]}
    replace_manifest(chain, SECOND, **changes)
    with pytest.raises(CheckpointDamaged, match=f"{SECOND}, which builds on {FULL}, .*{reason}"):
        chain.chain(SECOND)
    report = verify(chain, SECOND)
    assert not report.ok
    assert reason in report.problems[0]


# -- verification --------------------------------------------------------------------------


def test_a_whole_chain_is_verified(chain: CheckpointStorage) -> None:
    calls: list[tuple[int, int]] = []
    report = verify(chain, THIRD, progress=lambda done, total: calls.append((done, total)))
    assert report.ok
    assert report.chain == (FULL, SECOND, THIRD)
    assert [file.verdict for file in report.files] == ["ok"] * 6
    assert calls[-1][0] == calls[-1][1] == sum(file.bytes for file in report.files)


@pytest.mark.parametrize("damage", ["missing", "wrong size", "wrong checksum", "unreadable"])
def test_each_kind_of_damage_is_named_and_nothing_of_it_read(
    chain: CheckpointStorage, damage: str
) -> None:
    manifest = chain.read_manifest(FULL)
    path = chain.part_path(FULL, manifest.parts[1].file)
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "wrong size":
        path.write_bytes(content[:-1])
    else:
        content[-1 if damage == "wrong checksum" else 12] ^= 1
        path.write_bytes(content)
    if damage == "unreadable":
        # The attacker has put the checksums right.
        from tests.unit.checkpoint_files import resealed

        replace_manifest(chain, FULL, parts=resealed(chain, manifest, 1).parts)
    report = verify(chain, THIRD)
    assert [file.verdict for file in report.files] == ["ok", damage, *["ok"] * 4]
    assert not report.ok
    with (
        CheckpointReader(chain, THIRD) as reader,
        pytest.raises(CheckpointDamaged, match=f"{FULL}/{path.name}"),
    ):
        reader.row_count(ADS.name)


def test_a_damaged_manifest_is_named(chain: CheckpointStorage) -> None:
    path = Path(chain.url) / SECOND / MANIFEST_FILE
    path.write_bytes(path.read_bytes()[:-1])
    report = verify(chain, THIRD)
    assert (report.files[0].checkpoint, report.files[0].file) == (SECOND, MANIFEST_FILE)
    assert report.files[0].verdict == "unreadable"
    assert report.chain == (THIRD,)


def test_keys_and_slots_of_the_helper_agree() -> None:
    assert sorted(of_slots(list(full_content().rows[ADS]), range(SLOT_COUNT))) == sorted(
        full_content().rows[ADS]
    )


# -- lists ---------------------------------------------------------------------------------


def test_a_list_tells_which_can_be_restored(chain: CheckpointStorage, tmp_path: Path) -> None:
    assert [entry.problem for entry in catalogue(chain)] == ["", "", ""]
    assert [entry.rows for entry in catalogue(chain)] == [44, 1, 1]
    fourth = "ckpt-000004-dddddd"
    make_checkpoint(chain, tmp_path, fourth, full_content(3))
    path = Path(chain.url) / SECOND / MANIFEST_FILE
    path.write_bytes(path.read_bytes()[:-1])
    damaged = catalogue(chain)
    assert [entry.id for entry in damaged] == [FULL, SECOND, THIRD, fourth]
    assert [bool(entry.problem) for entry in damaged] == [False, True, True, False]
    assert damaged[1].manifest is None
    assert damaged[2].problem.startswith(f"it builds on {SECOND}: {SECOND}/manifest.json: ")
    chain.delete(SECOND)
    assert catalogue(chain)[1].problem == f"it builds on {SECOND}, which is missing"
