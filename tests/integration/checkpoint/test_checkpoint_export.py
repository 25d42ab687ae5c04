"""Exports: read by other libraries, looked up mapped, and put into a Paddle or PyTorch model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from backstay.checkpoint.documents import parse_object, write_object
from backstay.checkpoint.export import EXPORT_FILE, Format, export
from backstay.checkpoint.export_reader import Export, ExportedTable
from backstay.checkpoint.storage import CheckpointStorage
from backstay.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointUnavailable,
    InvalidRequest,
)
from backstay.pserver.local_cluster import LocalCluster
from backstay.tables import TableSpec, Uniform
from backstay.trainer import Client
from tests.unit.checkpoint_files import (
    ADS,
    FULL,
    LAYER,
    SECOND,
    Content,
    full_content,
    make_checkpoint,
)

BIG = 2**64 - 1
ADS_FILE = "table-0000-ads_user"


@pytest.fixture
def storage(tmp_path: Path) -> CheckpointStorage:
    """A chain of two: the second changes some rows and deletes one."""
    storage = CheckpointStorage(tmp_path / "root")
    first = min(full_content().rows[ADS])
    make_checkpoint(storage, tmp_path, FULL, full_content())
    changes = Content({ADS: {BIG: 50.0, 3: 51.0}}, {ADS: [first]})
    make_checkpoint(storage, tmp_path, SECOND, changes, base=FULL)
    return storage


def expected() -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    rows = dict(full_content().rows[ADS])
    del rows[min(rows)]
    rows |= {BIG: 50.0, 3: 51.0}
    keys = sorted(rows)
    weights = np.repeat(np.array([rows[key] for key in keys], np.float32)[:, None], 3, axis=1)
    return np.array(keys, np.uint64), weights


def test_an_export_is_read_by_safetensors_and_numpy_alone(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    calls: list[tuple[str, int]] = []
    folder = export(
        storage, SECOND, tmp_path / "out", progress=lambda name, rows: calls.append((name, rows))
    )
    assert calls[-1] == ("ads/user", 41)
    arrays = load_file(folder / f"{ADS_FILE}.safetensors")
    keys, weights = expected()
    np.testing.assert_array_equal(arrays["keys"], keys)
    np.testing.assert_array_equal(arrays["weights"], weights)
    dense = load_file(folder / "dense.safetensors")["layer.w"]
    assert dense.shape == (5, 3)
    assert dense.reshape(-1).tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 3
    index = json.loads((folder / EXPORT_FILE).read_text(encoding="utf-8"))
    assert index["checkpoint"] == SECOND
    assert index["tags"] == {"pass": 3, "note": "größer"}
    assert index["tables"] == [
        {
            "spec": json.loads(ADS.to_json()),
            "file": f"{ADS_FILE}.safetensors",
            "rows": 41,
        }
    ]
    assert not list(tmp_path.glob("*.tmp"))


def test_an_export_is_read_by_pyarrow_alone(storage: CheckpointStorage, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = export(storage, SECOND, tmp_path / "out", "parquet")
    table = parquet.read_table(folder / f"{ADS_FILE}.parquet")
    keys, weights = expected()
    assert table["key"].to_pylist() == keys.tolist()
    assert table["weights"].to_pylist() == weights.tolist()
    assert {path.name for path in folder.iterdir()} == {
        EXPORT_FILE, "dense.safetensors", f"{ADS_FILE}.parquet",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["safetensors", "parquet"])
def test_rows_are_looked_up(storage: CheckpointStorage, tmp_path: Path, kind: Format) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    folder = export(storage, SECOND, tmp_path / "out", kind)
    opened = Export.open(folder)
    opened.verify()
    assert (opened.checkpoint, opened.sparse, opened.dense_tables) == (SECOND, (ADS,), (LAYER,))
    table = opened.table(ADS.name)
    keys, weights = expected()
    assert len(table) == len(keys)
    assert table.dim == 3
    np.testing.assert_array_equal(table.lookup(keys[::-1]), weights[::-1])
    # Signed keys keep their bits, whatever their width; any shape.
    for ids in (np.array([[-1, 3]]), np.array([[-1, 3]], np.int32), [[-1, 3]]):
        np.testing.assert_array_equal(table.lookup(ids), [[[50.0] * 3, [51.0] * 3]])
    np.testing.assert_array_equal(table.lookup([2, 3]), [[0.0] * 3, [51.0] * 3])
    assert table.lookup([]).shape == (0, 3)
    with pytest.raises(InvalidRequest, match="no row of 1 of 2 keys; the first is 2"):
        table.lookup([3, 2], unknown="refuse")
    with pytest.raises(InvalidRequest, match="must be integers"):
        table.lookup([0.5])
    with pytest.raises(InvalidRequest, match="allowed: zeros"):
        table.lookup([1], unknown="nonsense")  # type: ignore[arg-type]
    own_keys, own_weights = table.to_numpy()
    np.testing.assert_array_equal(own_keys, keys)
    np.testing.assert_array_equal(own_weights, weights)
    assert own_keys.flags.writeable
    assert own_weights.flags.writeable
    np.testing.assert_array_equal(
        opened.dense("layer.w"), load_file(folder / "dense.safetensors")["layer.w"]
    )
    again = ExportedTable.open(folder / f"{ADS_FILE}.{kind}")
    np.testing.assert_array_equal(again.weights, table.weights)
    with pytest.raises(InvalidRequest, match=r"no sparse table 'layer.w'; it has: ads/user"):
        opened.table("layer.w")
    with pytest.raises(InvalidRequest, match="no dense table"):
        opened.dense("ads/user")


def test_opening_a_table_maps_it(storage: CheckpointStorage, tmp_path: Path) -> None:
    table = Export.open(export(storage, SECOND, tmp_path / "out")).table(ADS.name)
    base: Any = table.weights
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    assert not table.weights.flags.writeable


@pytest.mark.parametrize("storage_kind", ["float32", "bfloat16"])
def test_unknown_keys_get_what_a_server_would_give(tmp_path: Path, storage_kind: Any) -> None:
    spec = TableSpec.sparse("ads", 5, seed=9, initializer=Uniform(-1.0, 1.0), storage=storage_kind)
    storage = CheckpointStorage(tmp_path / "root")
    make_checkpoint(storage, tmp_path, FULL, Content({spec: {4: 1.0}}), tables=(spec,))
    table = Export.open(export(storage, FULL, tmp_path / "out")).table("ads")
    keys = np.array([[BIG, 4], [0, 77]], np.uint64)
    with LocalCluster(servers=1) as cluster, Client(cluster.endpoints) as client:
        client.create_table(spec)
        fresh = client.pull("ads", keys)
    rows = table.lookup(keys, unknown="initial")
    assert rows[0, 1].tolist() == [1.0] * 5
    np.testing.assert_array_equal(
        np.delete(rows.reshape(-1, 5), 1, 0), np.delete(fresh.reshape(-1, 5), 1, 0)
    )


def test_a_table_without_rows(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "root")
    make_checkpoint(storage, tmp_path, FULL, Content())
    for kind in ("safetensors", "parquet"):
        folder = export(storage, FULL, tmp_path / kind, kind)
        assert Export.open(folder).table(ADS.name).lookup([1]).tolist() == [[0.0] * 3]


def test_a_damaged_checkpoint_leaves_no_export(storage: CheckpointStorage, tmp_path: Path) -> None:
    part = next(Path(storage.url, FULL).glob("part-*"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=part.name):
        export(storage, SECOND, tmp_path / "out" / "deeper")
    assert not list((tmp_path / "out").iterdir())


def test_what_cannot_be_exported_is_refused(storage: CheckpointStorage, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="exists already"):
        export(storage, SECOND, tmp_path)
    with pytest.raises(InvalidRequest, match="allowed: safetensors, parquet"):
        export(storage, SECOND, tmp_path / "out", "pickle")  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFound, match="ckpt-000009-000000"):
        export(storage, "ckpt-000009-000000", tmp_path / "out")
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(CheckpointUnavailable, match="file"):
        export(storage, SECOND, tmp_path / "file" / "out")


def test_damage_of_an_export_is_named(storage: CheckpointStorage, tmp_path: Path) -> None:
    folder = export(storage, SECOND, tmp_path / "out")
    path = folder / f"{ADS_FILE}.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\0")
    with pytest.raises(CheckpointDamaged, match=f"{path.name}: its checksum is wrong"):
        Export.open(folder).verify()
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointDamaged, match=f"{path.name}: {len(content) - 1} bytes"):
        Export.open(folder)
    path.unlink()
    with pytest.raises(CheckpointDamaged, match=f"{path.name}: missing"):
        Export.open(folder)
    index = folder / EXPORT_FILE
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged, match=EXPORT_FILE):
        Export.open(folder)
    index.unlink()
    with pytest.raises(CheckpointNotFound, match="holds no export"):
        Export.open(folder)


@pytest.mark.parametrize("name", ["../root/x", "/etc/passwd", "..", ""])
def test_path_traversal_in_an_export_is_refused(
    storage: CheckpointStorage, tmp_path: Path, name: str
) -> None:
    folder = export(storage, SECOND, tmp_path / "out")
    document = parse_object((folder / EXPORT_FILE).read_bytes())
    document["files"][0]["file"] = document["tables"][0]["file"] = name
    (folder / EXPORT_FILE).write_text(write_object(document), encoding="utf-8")
    with pytest.raises(CheckpointDamaged, match="leads out of the folder"):
        Export.open(folder)


# -- frameworks ----------------------------------------------------------------------------


@pytest.mark.paddle
def test_a_paddle_model_has_its_trained_embedding(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    paddle = pytest.importorskip("paddle")
    from backstay.trainer.paddle.inference import CopiedEmbedding, MappedEmbedding

    table = Export.open(export(storage, SECOND, tmp_path / "out")).table(ADS.name)
    ids = paddle.to_tensor([[-1, 3], [2, 7 * 2**58 + 7]])
    wanted = np.array([[50.0, 51.0], [0.0, 7.0]])[..., None].repeat(3, axis=2)
    copied = CopiedEmbedding(table)
    for layer in (MappedEmbedding(table), copied):
        np.testing.assert_array_equal(layer(ids).numpy(), wanted)
        assert layer(ids[:0]).shape == [0, 2, 3]
    wanted[0, 1] = 0.0
    for layer in (MappedEmbedding(table, 3), CopiedEmbedding(table, padding_idx=3)):
        np.testing.assert_array_equal(layer(ids).numpy(), wanted)
        assert "dim=3" in repr(layer)
    with pytest.raises(InvalidRequest, match="no row"):
        MappedEmbedding(table, unknown="refuse")(ids)
    other = CopiedEmbedding(table, padding_idx=3)
    other.set_state_dict(copied.state_dict())
    np.testing.assert_array_equal(other(ids).numpy(), copied(ids).numpy())


@pytest.mark.paddle
def test_a_copied_embedding_is_saved_as_a_program(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    paddle = pytest.importorskip("paddle")
    from backstay.trainer.paddle.inference import CopiedEmbedding

    table = Export.open(export(storage, SECOND, tmp_path / "out")).table(ADS.name)
    spec = paddle.static.InputSpec([None, None], "int64")
    layer = CopiedEmbedding(table, padding_idx=3)
    layer.eval()
    paddle.jit.save(layer, str(tmp_path / "model"), input_spec=[spec])
    program = paddle.jit.load(str(tmp_path / "model"))
    ids = paddle.to_tensor([[-1, 3, 2], [7 * 2**58 + 7, -1, 0]])
    np.testing.assert_array_equal(program(ids).numpy(), layer(ids).numpy())


@pytest.mark.torch
def test_a_pytorch_model_has_its_trained_embedding(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from backstay.trainer.torch.inference import CopiedEmbedding, MappedEmbedding

    table = Export.open(export(storage, SECOND, tmp_path / "out")).table(ADS.name)
    ids = torch.tensor([[-1, 3], [2, 7 * 2**58 + 7]])
    wanted = np.array([[50.0, 51.0], [0.0, 7.0]])[..., None].repeat(3, axis=2)
    copied = CopiedEmbedding(table)
    for module in (MappedEmbedding(table), copied):
        np.testing.assert_array_equal(module(ids).numpy(), wanted)
        assert module(ids[:0]).shape == (0, 2, 3)
    wanted[0, 1] = 0.0
    for module in (MappedEmbedding(table, 3), CopiedEmbedding(table, padding_idx=3)):
        np.testing.assert_array_equal(module(ids).numpy(), wanted)
        assert "dim=3" in repr(module)
    with pytest.raises(InvalidRequest, match="no row"):
        MappedEmbedding(table, unknown="refuse")(ids)
    other = CopiedEmbedding(table, padding_idx=3)
    other.load_state_dict(copied.state_dict())
    np.testing.assert_array_equal(other(ids).numpy(), copied(ids).numpy())
    whole = torch.compile(copied, backend="aot_eager", fullgraph=True)
    np.testing.assert_array_equal(whole(ids).numpy(), copied(ids).numpy())


def test_inference_needs_no_network_and_no_framework(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    folder = export(storage, SECOND, tmp_path / "out")
    program = (
        "import sys\n"
        "for name in ('grpc', 'paddle', 'torch', 'fsspec', 'pyarrow', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "from backstay.checkpoint.export_reader import Export\n"
        f"print(Export.open({str(folder)!r}).table('ads/user').lookup([3]).tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[[51.0, 51.0, 51.0]]", done.stderr


@pytest.mark.paddle
def test_the_programs_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paddle")
    guide = Path(__file__).resolve().parents[3] / "docs" / "guide"
    online, first, *programs = _programs(guide / "checkpoints.md")
    # The first needs a cluster (test_checkpoints.py saves like that), the
    # second has storages that are not here.
    assert online.startswith("client.checkpoints.save(")
    assert "CheckpointStorage(" in first
    assert len(programs) == 4
    served = [one for one in _programs(guide / "serve.md") if 'Export.open("served")' in one]
    assert len(served) == 2
    tables = (
        TableSpec.sparse("ads", 3),
        TableSpec.sparse("clicks/ads", 3),
        TableSpec.dense("layer/w", (2, 2)),
    )
    content = Content({tables[0]: {17: 1.0}, tables[1]: {17: 1.0}})
    storage = CheckpointStorage(tmp_path / "root")
    make_checkpoint(storage, tmp_path, "ckpt-000007-3fa9c1", content, tables=tables)
    monkeypatch.chdir(tmp_path)
    export(storage, "ckpt-000007-3fa9c1", "served")
    names: dict[str, Any] = {"storage": storage, "model": SimpleNamespace()}
    for program in programs:
        exec(program, names)
    assert names["layer"].shape == (2, 2)
    assert names["report"].ok
    for program in served:
        exec(program, names)
    assert names["rows"][:, :, 0].tolist() == [[1.0, 0.0], [1.0, 0.0]]


def _programs(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
