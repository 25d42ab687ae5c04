"""Which checkpoints of a folder go when some of them cannot be restored."""

from __future__ import annotations

from pathlib import Path

from backstay.checkpoint.storage import CheckpointStorage
from backstay.pserver.checkpoints.upkeep import thin_out
from tests.unit.checkpoint_files import ADS, Content, make_checkpoint

IDS = [f"ckpt-{number:06d}-3fa9c1" for number in range(1, 6)]


def add(storage: CheckpointStorage, folder: Path, number: int, base: int | None = None) -> None:
    make_checkpoint(
        storage,
        folder,
        IDS[number - 1],
        Content({ADS: {17: 1.0}}),
        base=IDS[base - 1] if base else None,
    )


def left(storage: CheckpointStorage) -> list[int]:
    return [IDS.index(each) + 1 for each in sorted(storage.ids())]


def test_what_cannot_be_restored_takes_no_place_and_goes_when_it_is_old(tmp_path: Path) -> None:
    root = tmp_path / "root"
    storage = CheckpointStorage(root)
    add(storage, tmp_path, 1)
    add(storage, tmp_path, 2)
    add(storage, tmp_path, 3, base=2)
    (root / IDS[1] / "manifest.json").write_bytes(b"{")
    # 3 builds on a manifest that cannot be read, so 1 is what a restore would go back to.
    thin_out(storage, 1, 0, in_use=())
    assert left(storage) == [1, 2, 3]
    add(storage, tmp_path, 4)
    thin_out(storage, 1, 0, in_use=())
    assert left(storage) == [2, 4]
    add(storage, tmp_path, 5, base=4)
    thin_out(storage, 1, 0, in_use=())
    assert left(storage) == [2, 4, 5]
