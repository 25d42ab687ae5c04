"""Trained models in plain Paddle: from a checkpoint or the files of an export, without a cluster.

May import paddle, ``backstay.checkpoint``, this package and what is neutral of it.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import fsspec
import numpy as np
import paddle

from backstay.checkpoint.export import ModelLayer, ModelPart
from backstay.checkpoint.lookup import ExportedTable, Unknown
from backstay.checkpoint.trained import TrainedTables, open_trained
from backstay.errors import CheckpointUnavailable, ConfigError
from backstay.job.model_definition import ModelDefinition
from backstay.job_spec import JobSpec
from backstay.trainer.adapter.exported_rows import looked_up, looked_up_bags, sorted_rows
from backstay.trainer.adapter.offline import job_of, offline, warn_untrained
from backstay.trainer.model.asked_model import asked_model
from backstay.trainer.paddle.embedding import Embedding, EmbeddingBag
from backstay.trainer.paddle.lookup import as_keys, as_tensor
from backstay.trainer.paddle.training import build

__all__ = [
    "CopiedEmbedding",
    "MappedEmbedding",
    "MappedEmbeddingBag",
    "load_for_inference",
    "model_part",
]

SAVED_FILE = "model.pdparams"
NAMED_MAX = 5
# What makes a model: a file, a function, or the model itself.
Asked: TypeAlias = "str | Path | Callable[[], Any] | paddle.nn.Layer"


class MappedEmbedding(paddle.nn.Layer):  # type: ignore[misc]
    """Looks rows up in the file of an export, which stays where it is.

    Takes no memory of its own, and processes that serve the same model share what they read. Not
    for ``paddle.jit``: the lookup is not Paddle's.

    Args:
        table: From ``backstay.checkpoint.lookup``.
        padding_idx: The id that is answered with zeros.
        unknown: What an id gets that training has not met: see ``ExportedTable.lookup``.
    """

    def __init__(
        self,
        table: ExportedTable,
        padding_idx: int | None = None,
        *,
        unknown: Unknown = "zeros",
    ) -> None:
        super().__init__()
        self._table = table
        self._padding = padding_idx
        self._unknown = unknown

    def forward(self, ids: Any) -> paddle.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim]."""
        rows = looked_up(self._table, as_keys(ids), self._padding, self._unknown)
        return as_tensor(rows)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this layer."""
        return f"table={self._table.spec.name!r}, rows={len(self._table)}, dim={self._table.dim}"


class MappedEmbeddingBag(paddle.nn.Layer):  # type: ignore[misc]
    """Sums or averages the rows of each bag, as ``backstay.trainer.paddle.EmbeddingBag`` does.

    Args:
        table: From ``backstay.checkpoint.lookup``.
        padding_idx: The id that does not count.
        mode: "sum" or "mean"; an empty bag gives zeros.
        unknown: What an id gets that training has not met: see ``ExportedTable.lookup``.
    """

    def __init__(
        self,
        table: ExportedTable,
        padding_idx: int | None = None,
        *,
        mode: Literal["sum", "mean"] = "mean",
        unknown: Unknown = "zeros",
    ) -> None:
        super().__init__()
        if mode not in ("sum", "mean"):
            raise ConfigError(f"mode is {mode!r}; it must be 'sum' or 'mean'")
        self.mode = mode
        self._table = table
        self._padding = padding_idx
        self._unknown = unknown

    def forward(self, ids: Any, offsets: Any = None) -> paddle.Tensor:
        """Return one row a bag, float32 [bags, dim].

        Args:
            ids: [bags, n], short bags filled with ``padding_idx``; or flat with ``offsets``.
            offsets: Where each bag begins in the flat ids.

        Raises:
            InvalidRequest: Shapes and offsets do not fit.
        """
        starts = None if offsets is None else as_keys(offsets)
        mean = self.mode == "mean"
        rows = looked_up_bags(
            self._table, as_keys(ids), starts, self._padding, self._unknown, mean=mean
        )
        return as_tensor(rows)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this layer."""
        return (
            f"table={self._table.spec.name!r}, rows={len(self._table)}, dim={self._table.dim}, "
            f"mode={self.mode!r}"
        )


class CopiedEmbedding(paddle.nn.Layer):  # type: ignore[misc]
    """Holds all rows in tensors: on any device, in ``state_dict()``, for ``paddle.jit``.

    Ids that training has not met, and ``padding_idx``, are answered with zeros.

    Args:
        table: From ``backstay.checkpoint.lookup``; not needed afterwards.
        padding_idx: The id that is answered with zeros.

    Raises:
        ConfigError: The table has no rows.
    """

    def __init__(self, table: ExportedTable, padding_idx: int | None = None) -> None:
        super().__init__()
        keys, rows = sorted_rows(table, padding_idx)
        self.register_buffer("keys", paddle.to_tensor(keys))
        self.register_buffer("weight", paddle.to_tensor(rows))

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim]."""
        wanted = ids.astype("int64")
        last = self.keys.shape[0]
        places = paddle.searchsorted(self.keys, wanted)
        found = paddle.gather_nd(self.keys, paddle.clip(places, max=last - 1).unsqueeze(-1))
        rows = places + (last - places) * (found != wanted).astype("int64")
        return paddle.nn.functional.embedding(rows, self.weight)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this layer."""
        return f"rows={self.keys.shape[0]}, dim={self.weight.shape[-1]}"


def load_for_inference(
    model: Asked,
    source: str | Path,
    *,
    job: str | None = None,
    model_params: Mapping[str, Any] | None = None,
    unknown: Unknown = "initial",
) -> paddle.nn.Layer:
    """Return a trained model as a plain layer in evaluation mode; no servers are needed.

    Its embeddings whose rows were on servers look them up: in the files of an export, which stay
    mapped, or in memory, where a checkpoint was read. They have no state: ``state_dict()`` has all
    else under the names of the model, and is loaded into such a model with ``strict=True``.

    Args:
        model: The model file of a job, or ``job.json`` of its ``log_dir``. A model made as for one
            machine, with the export of ``backstay export``. Or a function that makes the model and
            wraps its optimizer in ``DistributedOptimizer``, as for training, and returns the model.
        source: An export, a checkpoint, or a folder or URL of checkpoints: then the newest.
        job: Whose tables these are. Default: the only job there.
        model_params: Arguments of the model file's ``custom_model``.
        unknown: What an id gets that training has not met: "initial", what a server would have
            answered; "zeros"; or "refuse".

    Raises:
        ConfigError: The model or its file is wrong, or does not have this state.
        InvalidRequest: The tables are of another model.
        CheckpointNotFound: There is no checkpoint and no export.
        CheckpointDamaged: It is damaged.
    """
    with open_trained(source) as tables:
        return _loaded(model, tables, job, model_params, unknown)


def _loaded(
    model: Asked,
    tables: TrainedTables,
    job: str | None,
    model_params: Mapping[str, Any] | None,
    unknown: Unknown,
) -> Any:
    part = tables.model
    if isinstance(model, paddle.nn.Layer):
        if part is None:
            raise ConfigError(
                f"{tables.where} does not say which tables a model has: pass the model file or a "
                "function that makes the model and its optimizer, or make an export of a job with "
                "`backstay export`"
            )
        return _filled(model, part, tables, unknown)
    if isinstance(model, str | Path):
        definition, spec, job = asked_model(
            model, job=job, only_job=lambda: job_of(tables), model_params=model_params
        )
        if part is None:
            made, layers, untrained = trained(definition, spec, tables, job)
            saved = _saved(spec.output) if untrained else {}
            _load_saved(made, saved, untrained)
            return _with_rows(made, layers, tables, unknown)
        model = definition.make_model
    job = job_of(tables) if job is None else job
    # Layers and parameters are numbered from 0, as in the process that trained them.
    with offline(tables, job), paddle.utils.unique_name.guard():
        made = model()
    if not isinstance(made, paddle.nn.Layer):
        raise ConfigError(f"the model is a {type(made).__name__}, not a paddle.nn.Layer")
    if part is not None:
        return _filled(made, part, tables, unknown)
    return _with_rows(made, _layers_of(made), tables, unknown)


def model_part(
    definition: ModelDefinition, spec: JobSpec, tables: TrainedTables
) -> tuple[ModelPart, list[str]]:
    """Return what an export says of a job's model, and which of its state nobody has trained.

    These are buffers and frozen parameters, which are on no server: they come from
    ``model.pdparams`` in the job's ``output``, or else have the values that the model file gives
    them.

    Raises:
        ConfigError: The model file is wrong.
        InvalidRequest: The tables are of another model.
    """
    model, layers, untrained = trained(definition, spec, tables, spec.model_from or spec.name)
    untrained = _load_saved(model, _saved(spec.output) if untrained else {}, untrained, warn=False)
    model = _with_rows(model, layers, tables, "initial")
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    return ModelPart("paddle", layers, state), untrained


def trained(
    definition: ModelDefinition, spec: JobSpec, tables: TrainedTables, job: str
) -> tuple[Any, tuple[ModelLayer, ...], list[str]]:
    """Make a job's model as its workers do, on trained tables.

    Returns:
        The model, with layers on servers that are not there; these layers; and the names of what
        no optimizer has trained.
    """
    with offline(tables, job) as session:
        model = build(definition, session.client, spec).model
    layers = _layers_of(model)
    handles = {f"{layer.path}.handle".lstrip(".") for layer in layers}
    trains = {name for name, one in model.named_parameters() if not one.stop_gradient}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows that are not in state_dict()
        names = list(model.state_dict())
    return model, layers, [name for name in names if name not in trains | handles]


def _layers_of(model: Any) -> tuple[ModelLayer, ...]:
    found = []
    for path, layer in _places(model):
        if isinstance(layer, EmbeddingBag):
            found.append(ModelLayer(path, layer.table_name, layer.mode, layer.padding_idx))
        elif isinstance(layer, Embedding):
            found.append(ModelLayer(path, layer.table_name, padding_idx=layer.padding_idx))
    return tuple(found)


def _places(model: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every place of a module in a model; one that is shared has several."""
    yield path, model
    for name, child in model._sub_layers.items():
        yield from _places(child, f"{path}.{name}" if path else name)


def _filled(model: Any, part: ModelPart, tables: TrainedTables, unknown: Unknown) -> Any:
    """Put an exported model's rows and state into a model."""
    model = _with_rows(model, part.layers, tables, unknown)
    own = model.state_dict()
    if own.keys() != part.state.keys():
        differing = ", ".join(sorted(own.keys() ^ part.state.keys())[:NAMED_MAX])
        raise ConfigError(f"{tables.where} is of another model: only one of them has {differing}")
    for name, value in part.state.items():
        if tuple(own[name].shape) != value.shape:
            raise ConfigError(
                f"{tables.where} is of another model: {name} has the shape {value.shape} there "
                f"and {tuple(own[name].shape)} here"
            )
        own[name].set_value(np.array(value))
    return model


def _with_rows(
    model: Any, layers: Sequence[ModelLayer], tables: TrainedTables, unknown: Unknown
) -> Any:
    for layer in layers:
        table = tables.table(layer.table)
        rows: Any
        if layer.bag is None:
            rows = MappedEmbedding(table, layer.padding_idx, unknown=unknown)
        else:
            rows = MappedEmbeddingBag(
                table,
                layer.padding_idx,
                mode=layer.bag,  # type: ignore[arg-type]
                unknown=unknown,
            )
        above, _, name = layer.path.rpartition(".")
        if not name:
            model = rows
            continue
        parent = model
        for step in above.split(".") if above else ():
            parent = parent._sub_layers.get(step)
            if parent is None:
                raise ConfigError(f"the model has no {above!r}, where {name!r} should be")
        if name not in parent._sub_layers:
            raise ConfigError(f"the model has no layer {layer.path!r}")
        setattr(parent, name, rows)
    model.eval()
    return model


def _saved(output: str) -> dict[str, Any]:
    """Return what the end of training saved in a job's ``output``; empty: nothing."""
    if not output:
        return {}
    try:
        files, root = fsspec.core.url_to_fs(output)
        if not files.exists(f"{root}/{SAVED_FILE}"):
            return {}
        with tempfile.TemporaryDirectory() as folder:
            local = str(Path(folder) / SAVED_FILE)
            files.get_file(f"{root}/{SAVED_FILE}", local)
            saved: dict[str, Any] = paddle.load(local)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointUnavailable(f"output: {output}: {error}") from error
    return saved


def _load_saved(
    model: Any, saved: Mapping[str, Any], names: Sequence[str], *, warn: bool = True
) -> list[str]:
    """Load state that is on no server; return, and warn of, what is not there either."""
    there = {name: saved[name] for name in names if name in saved}
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in there.items():
        own[name].set_value(value)
    missing = [name for name in names if name not in there]
    if missing and warn:
        warn_untrained(missing, SAVED_FILE)
    return missing
