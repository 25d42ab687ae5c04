"""Trained models in plain Paddle: from a checkpoint or the files of an export, without a cluster.

May import paddle, ``backstay.checkpoint``, this package and what is neutral of it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import paddle
from numpy.typing import NDArray

from backstay.checkpoint.export import ModelLayer, ModelPart
from backstay.checkpoint.export_reader import RowsByKey, Unknown
from backstay.checkpoint.trained import TrainedTables
from backstay.errors import ConfigError
from backstay.job.model_definition import ModelDefinition
from backstay.job_spec import JobSpec
from backstay.listing import listed
from backstay.trainer.adapter import inference
from backstay.trainer.adapter.exported_rows import ExportedBags, ExportedRows, sorted_rows
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

# What makes a model: a file, a function, or the model itself.
Asked: TypeAlias = "str | Path | Callable[[], Any] | paddle.nn.Layer"


class MappedEmbedding(paddle.nn.Layer):  # type: ignore[misc]
    """Looks rows up in the file of an export, which stays where it is.

    Takes no memory of its own, and processes that serve the same model share what they read. Not
    for ``paddle.jit``: the lookup is not Paddle's.

    Args:
        table: From ``backstay.checkpoint.export_reader``.
        padding_idx: The id that is answered with zeros.
        unknown: What an id gets that training has not met: see ``ExportedTable.lookup``.
    """

    def __init__(
        self,
        table: RowsByKey,
        padding_idx: int | None = None,
        *,
        unknown: Unknown = "zeros",
    ) -> None:
        super().__init__()
        self._rows = ExportedRows(table, padding_idx, unknown)

    def forward(self, ids: Any) -> paddle.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim]."""
        rows = self._rows.rows(as_keys(ids))
        return as_tensor(rows)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this layer."""
        return str(self._rows)


class MappedEmbeddingBag(paddle.nn.Layer):  # type: ignore[misc]
    """Sums or averages the rows of each bag, as ``backstay.trainer.paddle.EmbeddingBag`` does.

    Args:
        table: From ``backstay.checkpoint.export_reader``.
        padding_idx: The id that does not count.
        mode: "sum" or "mean"; an empty bag gives zeros.
        unknown: What an id gets that training has not met: see ``ExportedTable.lookup``.
    """

    def __init__(
        self,
        table: RowsByKey,
        padding_idx: int | None = None,
        *,
        mode: Literal["sum", "mean"] = "mean",
        unknown: Unknown = "zeros",
    ) -> None:
        super().__init__()
        self._rows = ExportedBags(table, padding_idx, unknown, mode)
        self.mode = mode

    def forward(self, ids: Any, offsets: Any = None) -> paddle.Tensor:
        """Return one row a bag, float32 [bags, dim].

        Args:
            ids: [bags, n], short bags filled with ``padding_idx``; or flat with ``offsets``.
            offsets: Where each bag begins in the flat ids.

        Raises:
            InvalidRequest: Shapes and offsets do not fit.
        """
        starts = None if offsets is None else as_keys(offsets)
        rows = self._rows.bags(as_keys(ids), starts)
        return as_tensor(rows)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this layer."""
        return str(self._rows)


class CopiedEmbedding(paddle.nn.Layer):  # type: ignore[misc]
    """Holds all rows in tensors: on any device, in ``state_dict()``, for ``paddle.jit``.

    Ids that training has not met, and ``padding_idx``, are answered with zeros.

    Args:
        table: From ``backstay.checkpoint.export_reader``; not needed afterwards.
        padding_idx: The id that is answered with zeros.

    Raises:
        ConfigError: The table has no rows.
    """

    def __init__(self, table: RowsByKey, padding_idx: int | None = None) -> None:
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


class _Paddle:
    """See :class:`backstay.trainer.adapter.inference.Framework`."""

    name = "paddle"
    module = "a paddle.nn.Layer"
    saved_file = "model.pdparams"

    build = staticmethod(build)

    def is_module(self, made: Any) -> bool:
        return isinstance(made, paddle.nn.Layer)

    def fresh_names(self) -> AbstractContextManager[Any]:
        guard: AbstractContextManager[Any] = paddle.utils.unique_name.guard()
        return guard

    def children(self, module: Any) -> Mapping[str, Any]:
        children: Mapping[str, Any] = module._sub_layers
        return children

    def layer(self, path: str, module: Any) -> ModelLayer | None:
        if isinstance(module, EmbeddingBag):
            return ModelLayer(path, module.table_name, module.mode, module.padding_idx)
        if isinstance(module, Embedding):
            return ModelLayer(path, module.table_name, padding_idx=module.padding_idx)
        return None

    def trained_names(self, model: Any) -> set[str]:
        return {name for name, one in model.named_parameters() if not one.stop_gradient}

    def state(self, model: Any) -> dict[str, NDArray[Any]]:
        return {name: value.numpy() for name, value in model.state_dict().items()}

    def load_state(self, model: Any, state: Mapping[str, NDArray[Any]], where: str) -> None:
        own = model.state_dict()
        if own.keys() != state.keys():
            differing = listed(sorted(own.keys() ^ state.keys()))
            raise ConfigError(f"{where} is of another model: only one of them has {differing}")
        for name, value in state.items():
            if tuple(own[name].shape) != value.shape:
                raise ConfigError(
                    f"{where} is of another model: {name} has the shape {value.shape} there "
                    f"and {tuple(own[name].shape)} here"
                )
            own[name].set_value(value)

    def read_saved(self, content: bytes) -> dict[str, Any]:
        saved: dict[str, Any] = paddle.load(io.BytesIO(content))
        return saved

    def load_saved(self, model: Any, values: Mapping[str, Any]) -> None:
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, value in values.items():
            own[name].set_value(value)

    def mapped(self, table: RowsByKey, layer: ModelLayer, unknown: Unknown) -> Any:
        if layer.bag is None:
            return MappedEmbedding(table, layer.padding_idx, unknown=unknown)
        return MappedEmbeddingBag(
            table,
            layer.padding_idx,
            mode=layer.bag,
            unknown=unknown,
        )

    def before_forward(self, model: Any, call: Callable[[], None]) -> None:
        model.register_forward_pre_hook(lambda _layer, _inputs: call())


_FRAMEWORK = _Paddle()


def load_for_inference(
    model: Asked,
    source: str | Path,
    *,
    job: str | None = None,
    model_params: Mapping[str, Any] | None = None,
    unknown: Unknown = "initial",
    follow: bool = False,
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
        follow: The source is a running export, and the model goes on with it: rows of the newest
            increment at each lookup, dense parameters of the newest before each ``forward``. Its
            ``follower`` tells how old they are; close it at the end. See ``backstay.serving``.

    Raises:
        ConfigError: The model or its file is wrong, or does not have this state.
        InvalidRequest: The tables are of another model.
        CheckpointNotFound: There is no checkpoint and no export.
        CheckpointDamaged: It is damaged.
    """
    made: paddle.nn.Layer = inference.load_for_inference(
        _FRAMEWORK,
        model,
        source,
        job=job,
        model_params=model_params,
        unknown=unknown,
        follow=follow,
    )
    return made


def model_part(
    definition: ModelDefinition, spec: JobSpec, tables: TrainedTables
) -> tuple[ModelPart, list[str]]:
    """Return what an export says of a job's model, and which of its state was not trained.

    These are buffers and frozen parameters, which are on no server: they come from
    ``model.pdparams`` in the job's ``output``, or else have the values that the model file gives
    them.

    Raises:
        ConfigError: The model file is wrong.
        InvalidRequest: The tables are of another model.
    """
    return inference.model_part(_FRAMEWORK, definition, spec, tables)
