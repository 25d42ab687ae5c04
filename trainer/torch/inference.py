"""Trained models in plain PyTorch: from a checkpoint or the files of an export, without a cluster.

May import torch, ``backstay.checkpoint``, this package and what is neutral of it.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import fsspec
import numpy as np
import torch

from backstay.checkpoint.export import ModelLayer, ModelPart
from backstay.checkpoint.lookup import ExportedTable, Unknown
from backstay.checkpoint.trained import TrainedTables, open_trained
from backstay.errors import CheckpointUnavailable, ConfigError, InvalidRequest
from backstay.job.model_definition import ModelDefinition
from backstay.job_spec import JobSpec
from backstay.trainer.adapter.exported_rows import looked_up, looked_up_bags, sorted_rows
from backstay.trainer.adapter.offline import job_of, offline, warn_untrained
from backstay.trainer.model.asked_model import asked_model
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

SAVED_FILE = "model.pt"
# What makes a model: a file, a function, or the model itself.
Asked: TypeAlias = "str | Path | Callable[[], Any] | torch.nn.Module"


class MappedEmbedding(torch.nn.Module):  # type: ignore[misc]
    """Looks rows up in the file of an export, which stays where it is.

    Takes no memory of its own, and processes that serve the same model share what they read. Not
    for ``torch.compile`` or ``torch.export``: the lookup is not PyTorch's.

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

    def forward(self, ids: Any) -> torch.Tensor:
        """Return the rows of ``ids``, float32 [*ids.shape, dim], on their device."""
        rows = looked_up(self._table, as_keys(ids), self._padding, self._unknown)
        return as_tensor(rows, _device_of(ids))

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this module."""
        return f"table={self._table.spec.name!r}, rows={len(self._table)}, dim={self._table.dim}"


class MappedEmbeddingBag(torch.nn.Module):  # type: ignore[misc]
    """Sums or averages the rows of each bag, as ``backstay.trainer.torch.EmbeddingBag`` does.

    Args:
        table: From ``backstay.checkpoint.lookup``.
        padding_idx: The id that does not count.
        mode: "sum" or "mean"; an empty bag gives zeros.
        include_last_offset: The last of the offsets is the number of ids and begins no bag.
        unknown: What an id gets that training has not met: see ``ExportedTable.lookup``.
    """

    def __init__(
        self,
        table: ExportedTable,
        padding_idx: int | None = None,
        *,
        mode: Literal["sum", "mean"] = "mean",
        include_last_offset: bool = False,
        unknown: Unknown = "zeros",
    ) -> None:
        super().__init__()
        if mode not in ("sum", "mean"):
            raise ConfigError(f"mode is {mode!r}; it must be 'sum' or 'mean'")
        self.mode = mode
        self.include_last_offset = include_last_offset
        self._table = table
        self._padding = padding_idx
        self._unknown = unknown

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
        rows = looked_up_bags(
            self._table, keys, starts, self._padding, self._unknown,
            mean=self.mode == "mean", weights=weights,
        )  # fmt: skip
        return as_tensor(rows, _device_of(ids))

    def extra_repr(self) -> str:
        """What ``print(model)`` shows of this module."""
        return (
            f"table={self._table.spec.name!r}, rows={len(self._table)}, dim={self._table.dim}, "
            f"mode={self.mode!r}"
        )


class CopiedEmbedding(torch.nn.Module):  # type: ignore[misc]
    """Holds all rows in tensors: on any device, in ``state_dict()``, for ``torch.compile``.

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


def load_for_inference(
    model: Asked,
    source: str | Path,
    *,
    job: str | None = None,
    model_params: Mapping[str, Any] | None = None,
    unknown: Unknown = "initial",
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
    if isinstance(model, torch.nn.Module):
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
    with offline(tables, job):
        made = model()
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"the model is a {type(made).__name__}, not a torch.nn.Module")
    if part is not None:
        return _filled(made, part, tables, unknown)
    return _with_rows(made, _layers_of(made), tables, unknown)


def model_part(
    definition: ModelDefinition, spec: JobSpec, tables: TrainedTables
) -> tuple[ModelPart, list[str]]:
    """Return what an export says of a job's model, and which of its state nobody has trained.

    These are buffers and frozen parameters, which are on no server: they come from ``model.pt`` in
    the job's ``output``, or else have the values that the model file gives them.

    Raises:
        ConfigError: The model file is wrong.
        InvalidRequest: The tables are of another model.
    """
    model, layers, untrained = trained(definition, spec, tables, spec.model_from or spec.name)
    untrained = _load_saved(model, _saved(spec.output) if untrained else {}, untrained, warn=False)
    model = _with_rows(model, layers, tables, "initial")
    state = {name: value.cpu().numpy() for name, value in model.state_dict().items()}
    return ModelPart("torch", layers, state), untrained


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
    trains = {name for name, one in model.named_parameters() if one.requires_grad}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows that are not in state_dict()
        names = list(model.state_dict())
    return model, layers, [name for name in names if name not in trains | handles]


def _layers_of(model: Any) -> tuple[ModelLayer, ...]:
    found = []
    for path, layer in _places(model):
        if isinstance(layer, EmbeddingBag):
            last = layer.include_last_offset
            bag = ModelLayer(path, layer.table_name, layer.mode, layer.padding_idx, last)
            found.append(bag)
        elif isinstance(layer, Embedding):
            found.append(ModelLayer(path, layer.table_name, padding_idx=layer.padding_idx))
    return tuple(found)


def _places(model: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every place of a module in a model; one that is shared has several."""
    yield path, model
    for name, child in model._modules.items():
        yield from _places(child, f"{path}.{name}" if path else name)


def _filled(model: Any, part: ModelPart, tables: TrainedTables, unknown: Unknown) -> Any:
    """Put an exported model's rows and state into a model."""
    model = _with_rows(model, part.layers, tables, unknown)
    state = {name: torch.from_numpy(np.array(value)) for name, value in part.state.items()}
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ConfigError(f"{tables.where} is of another model: {error}") from error
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
                include_last_offset=layer.include_last_offset,
                unknown=unknown,
            )
        above, _, name = layer.path.rpartition(".")
        if not name:
            model = rows
            continue
        try:
            parent = model.get_submodule(above)
        except AttributeError as error:
            raise ConfigError(f"the model has no {above!r}, where {name!r} should be") from error
        if name not in parent._modules:
            raise ConfigError(f"the model has no layer {layer.path!r}")
        setattr(parent, name, rows)
    return model.eval()


def _saved(output: str) -> dict[str, Any]:
    """Return what the end of training saved in a job's ``output``; empty: nothing."""
    if not output:
        return {}
    try:
        files, root = fsspec.core.url_to_fs(output)
        if not files.exists(f"{root}/{SAVED_FILE}"):
            return {}
        content = files.cat_file(f"{root}/{SAVED_FILE}")
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointUnavailable(f"output: {output}: {error}") from error
    saved: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return saved


def _load_saved(
    model: Any, saved: Mapping[str, Any], names: Sequence[str], *, warn: bool = True
) -> list[str]:
    """Load state that is on no server; return, and warn of, what is not there either."""
    there = {name: saved[name] for name in names if name in saved}
    model.load_state_dict(there, strict=False)
    missing = [name for name in names if name not in there]
    if missing and warn:
        warn_untrained(missing, SAVED_FILE)
    return missing


def _device_of(ids: Any) -> torch.device:
    return ids.device if isinstance(ids, torch.Tensor) else torch.device("cpu")
