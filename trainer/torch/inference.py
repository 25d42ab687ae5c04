"""Trained models in plain PyTorch: from a checkpoint or the files of an export, without a cluster.

May import torch, ``backstay.checkpoint``, this package and what is neutral of it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from numpy.typing import NDArray

from backstay.checkpoint.export import ModelLayer, ModelPart
from backstay.checkpoint.export_reader import RowsByKey, Unknown
from backstay.checkpoint.trained import TrainedTables
from backstay.errors import ConfigError, InvalidRequest
from backstay.job.model_definition import ModelDefinition
from backstay.job_spec import JobSpec
from backstay.trainer.adapter import inference
from backstay.trainer.adapter.exported_rows import ExportedBags, ExportedRows, sorted_rows
from backstay.trainer.torch.embedding import Embedding, EmbeddingBag
from backstay.trainer.torch.lookup import as_gradient, as_keys, as_tensor
from backstay.trainer.torch.training import build

__all__ = [
    "CopiedEmbedding",
    "MappedEmbedding",
    "MappedEmbeddingBag",
    "load_for_inference",
    "model_part",
]

# What makes a model: a file, a function, or the model itself.
Asked: TypeAlias = "str | Path | Callable[[], Any] | torch.nn.Module"


class MappedEmbedding(torch.nn.Module):  # type: ignore[misc]
    """Looks rows up in the file of an export, which stays where it is.

    Takes no memory of its own, and processes that serve the same model share what they read. Not
    for ``torch.compile`` or ``torch.export``: the lookup is not PyTorch's.

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

    def forward(self, ids: Any) -> torch.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim], on their device."""
        rows = self._rows.rows(as_keys(ids))
        return as_tensor(rows, _device_of(ids))

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this module."""
        return str(self._rows)


class MappedEmbeddingBag(torch.nn.Module):  # type: ignore[misc]
    """Sums or averages the rows of each bag, as ``backstay.trainer.torch.EmbeddingBag`` does.

    Args:
        table: From ``backstay.checkpoint.export_reader``.
        padding_idx: The id that does not count.
        mode: "sum" or "mean"; an empty bag gives zeros.
        include_last_offset: The last of the offsets is the number of ids and begins no bag.
        unknown: What an id gets that training has not met: see ``ExportedTable.lookup``.
    """

    def __init__(
        self,
        table: RowsByKey,
        padding_idx: int | None = None,
        *,
        mode: Literal["sum", "mean"] = "mean",
        include_last_offset: bool = False,
        unknown: Unknown = "zeros",
    ) -> None:
        super().__init__()
        self._rows = ExportedBags(table, padding_idx, unknown, mode)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self, ids: Any, offsets: Any = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return one row a bag, float32 [bags, dim], on the device of ``ids``.

        Args:
            ids: [bags, n], short bags filled with ``padding_idx``; or flat with ``offsets``.
            offsets: Where each bag begins in the flat ids.
            per_sample_weights: A factor for each id, with mode "sum" only.

        Raises:
            InvalidRequest: Shapes and offsets do not fit, or weights come with mode "mean".
        """
        keys = as_keys(ids)
        starts = None if offsets is None else as_keys(offsets)
        if starts is not None and self.include_last_offset:
            starts = starts[:-1]
        weights = None
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise InvalidRequest("per_sample_weights need mode='sum', as in PyTorch")
            weights = as_gradient(per_sample_weights)
        rows = self._rows.bags(keys, starts, weights)
        return as_tensor(rows, _device_of(ids))

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this module."""
        return str(self._rows)


class CopiedEmbedding(torch.nn.Module):  # type: ignore[misc]
    """Holds all rows in tensors: on any device, in ``state_dict()``, for ``torch.compile``.

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
        self.keys: Any
        self.weight: Any
        self.register_buffer("keys", torch.from_numpy(keys))
        self.register_buffer("weight", torch.from_numpy(rows))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim]."""
        wanted = ids.to(torch.int64)
        last = self.keys.shape[0]
        places = torch.searchsorted(self.keys, wanted)
        found = self.keys[places.clamp(max=last - 1)]
        rows = torch.where(found == wanted, places, torch.full_like(places, last))
        return torch.nn.functional.embedding(rows, self.weight)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this module."""
        return f"rows={self.keys.shape[0]}, dim={self.weight.shape[1]}"


class _Torch:
    """See :class:`backstay.trainer.adapter.inference.Framework`."""

    name = "torch"
    module = "a torch.nn.Module"
    saved_file = "model.pt"

    build = staticmethod(build)

    def is_module(self, made: Any) -> bool:
        return isinstance(made, torch.nn.Module)

    def fresh_names(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def children(self, module: Any) -> Mapping[str, Any]:
        children: Mapping[str, Any] = module._modules
        return children

    def layer(self, path: str, module: Any) -> ModelLayer | None:
        if isinstance(module, EmbeddingBag):
            last = module.include_last_offset
            return ModelLayer(path, module.table_name, module.mode, module.padding_idx, last)
        if isinstance(module, Embedding):
            return ModelLayer(path, module.table_name, padding_idx=module.padding_idx)
        return None

    def trained_names(self, model: Any) -> set[str]:
        return {name for name, one in model.named_parameters() if one.requires_grad}

    def state(self, model: Any) -> dict[str, NDArray[Any]]:
        return {name: value.cpu().numpy() for name, value in model.state_dict().items()}

    def load_state(self, model: Any, state: Mapping[str, NDArray[Any]], where: str) -> None:
        tensors = {name: torch.from_numpy(value) for name, value in state.items()}
        try:
            model.load_state_dict(tensors, strict=True)
        except RuntimeError as error:
            raise ConfigError(f"{where} is of another model: {error}") from error

    def read_saved(self, content: bytes) -> dict[str, Any]:
        saved: dict[str, Any] = torch.load(
            io.BytesIO(content), map_location="cpu", weights_only=True
        )
        return saved

    def load_saved(self, model: Any, values: Mapping[str, Any]) -> None:
        model.load_state_dict(values, strict=False)

    def mapped(self, table: RowsByKey, layer: ModelLayer, unknown: Unknown) -> Any:
        if layer.bag is None:
            return MappedEmbedding(table, layer.padding_idx, unknown=unknown)
        return MappedEmbeddingBag(
            table,
            layer.padding_idx,
            mode=layer.bag,
            include_last_offset=layer.include_last_offset,
            unknown=unknown,
        )

    def before_forward(self, model: Any, call: Callable[[], None]) -> None:
        model.register_forward_pre_hook(lambda _module, _inputs: call())


_FRAMEWORK = _Torch()


def load_for_inference(
    model: Asked,
    source: str | Path,
    *,
    job: str | None = None,
    model_params: Mapping[str, Any] | None = None,
    unknown: Unknown = "initial",
    follow: bool = False,
) -> torch.nn.Module:
    """Return a trained model as a plain module in evaluation mode; no servers are needed.

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
    made: torch.nn.Module = inference.load_for_inference(
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

    These are buffers and frozen parameters, which are on no server: they come from ``model.pt`` in
    the job's ``output``, or else have the values that the model file gives them.

    Raises:
        ConfigError: The model file is wrong.
        InvalidRequest: The tables are of another model.
    """
    return inference.model_part(_FRAMEWORK, definition, spec, tables)


def _device_of(ids: Any) -> torch.device:
    return ids.device if isinstance(ids, torch.Tensor) else torch.device("cpu")
