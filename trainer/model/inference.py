"""Makes a trained model for inference: from a checkpoint or an export, without servers.

May import ``backstay.checkpoint``, ``backstay.serving``, the session without servers and the
program of a model file; knows no framework.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from backstay.checkpoint.export import ModelLayer, ModelPart
from backstay.checkpoint.export_reader import RowsByKey, Unknown
from backstay.checkpoint.trained import TrainedTables, open_trained
from backstay.errors import CheckpointUnavailable, ConfigError, InvalidRequest
from backstay.job.asked_model import asked_model
from backstay.job.model_definition import ModelDefinition
from backstay.job_spec import JobSpec
from backstay.listing import listed
from backstay.serving import Follower
from backstay.trainer.adapter.dense import DenseGroup, made_groups
from backstay.trainer.adapter.exported_rows import MappedEmbedding, MappedEmbeddingBag
from backstay.trainer.adapter.framework import Framework, Module, Tensor, Tensors
from backstay.trainer.adapter.layers import Embedding, EmbeddingBag
from backstay.trainer.adapter.offline import job_of, offline, warn_untrained
from backstay.trainer.model.program import build

__all__ = ["Inference", "model_part"]


class Inference:
    """Loads models of one framework.

    Args:
        framework: Which.
        mapped: Its layer that looks rows up in the file of an export.
        mapped_bag: The same for bags.
    """

    def __init__(
        self,
        framework: Framework,
        mapped: type[MappedEmbedding],
        mapped_bag: type[MappedEmbeddingBag],
    ) -> None:
        self._framework = framework
        self._mapped = mapped
        self._mapped_bag = mapped_bag

    def load_for_inference(
        self,
        model: str | Path | Callable[[], Any] | Module,
        source: str | Path,
        *,
        job: str | None = None,
        model_params: Mapping[str, Any] | None = None,
        unknown: Unknown = "initial",
        follow: bool = False,
    ) -> Module:
        """Return a trained model as a plain one in evaluation mode; no servers are needed.

        Its embeddings whose rows were on servers look them up: in the files of an export, which
        stay mapped, or in memory, where a checkpoint was read. They have no state:
        ``state_dict()`` has all else under the names of the model, and is loaded into such a model
        with ``strict=True``.

        Args:
            model: The model file of a job, or ``job.json`` of its ``log_dir``. A model made as for
                one machine, with the export of ``backstay export``. Or a function that makes the
                model and wraps its optimizer in ``DistributedOptimizer``, as for training, and
                returns the model.
            source: An export, a checkpoint, or a folder or URL of checkpoints: then the newest.
            job: Whose tables these are. Default: the only job there.
            model_params: Arguments of the model file's ``custom_model``.
            unknown: What an id gets that training has not met: "initial", what a server would have
                answered; "zeros"; or "refuse".
            follow: The source is a running export, and the model goes on with it: rows of the
                newest increment at each lookup, dense parameters of the newest before each
                ``forward``. Its ``follower`` tells how old they are; close it at the end. See
                ``backstay.serving``.

        Raises:
            ConfigError: The model or its file is wrong, or does not have this state.
            InvalidRequest: The tables are of another model.
            CheckpointNotFound: There is no checkpoint and no export.
            CheckpointDamaged: It is damaged.
        """
        if not follow:
            with open_trained(source) as tables:
                return self._loaded(model, tables, job, model_params, unknown)
        follower = Follower(source)
        try:
            with made_groups() as groups:
                made = self._loaded(model, follower, job, model_params, unknown)
            values = _DenseValues(follower, groups)
            self._framework.before_call(made, lambda _: values.renew())
        except BaseException:
            follower.close()
            raise
        made.follower = follower
        return made

    def _loaded(
        self,
        model: Any,
        tables: TrainedTables,
        job: str | None,
        model_params: Mapping[str, Any] | None,
        unknown: Unknown,
    ) -> Module:
        framework, part = self._framework, tables.model
        if isinstance(model, framework.module_class):
            if part is None:
                raise ConfigError(
                    f"{tables.where} does not say which tables a model has: pass the model file or "
                    "a function that makes the model and its optimizer, or make an export of a job "
                    "with `backstay export`"
                )
            return self._filled(model, part, tables, unknown)
        make: Callable[[], Any] = model
        if isinstance(model, str | Path):
            definition, spec, job = asked_model(
                model, job=job, only_job=lambda: job_of(tables), model_params=model_params
            )
            if part is None:
                made, untrained = _trained(framework, definition, spec, tables, job)
                if untrained:
                    warn_untrained(untrained, framework.saved_file)
                return self._with_rows(made, _layers_of(framework, made), tables, unknown)
            make = definition.make_model
        job = job_of(tables) if job is None else job
        with offline(tables, job), framework.fresh_names():
            made = make()
        if not isinstance(made, framework.module_class):
            raise ConfigError(f"the model is a {type(made).__name__}, not {framework.module}")
        if part is not None:
            return self._filled(made, part, tables, unknown)
        return self._with_rows(made, _layers_of(framework, made), tables, unknown)

    def _filled(
        self, model: Module, part: ModelPart, tables: TrainedTables, unknown: Unknown
    ) -> Module:
        """Put an exported model's rows and state into a model."""
        model = self._with_rows(model, part.layers, tables, unknown)
        own = self._framework.state(model)
        if own.keys() != part.state.keys():
            differing = listed(sorted(own.keys() ^ part.state.keys()))
            raise ConfigError(
                f"{tables.where} is of another model: only one of them has {differing}"
            )
        for name, value in part.state.items():
            if tuple(own[name].shape) != value.shape:
                raise ConfigError(
                    f"{tables.where} is of another model: {name} has the shape {value.shape} there "
                    f"and {tuple(own[name].shape)} here"
                )
        _assign(self._framework.tensors, own, part.state)
        return model

    def _with_rows(
        self, model: Module, layers: Sequence[ModelLayer], tables: TrainedTables, unknown: Unknown
    ) -> Module:
        children = self._framework.children
        for layer in layers:
            rows = self._layer_with_rows(layer, tables.table(layer.table), unknown)
            above, _, name = layer.path.rpartition(".")
            if not name:
                model = rows
                continue
            parent = model
            for step in above.split(".") if above else ():
                parent = children(parent).get(step)
                if parent is None:
                    raise ConfigError(f"the model has no {above!r}, where {name!r} should be")
            if name not in children(parent):
                raise ConfigError(f"the model has no layer {layer.path!r}")
            setattr(parent, name, rows)
        self._framework.set_evaluation(model)
        return model

    def _layer_with_rows(self, layer: ModelLayer, table: RowsByKey, unknown: Unknown) -> Module:
        if layer.bag is None:
            return self._mapped(table, layer.padding_idx, unknown=unknown)
        return self._mapped_bag(
            table,
            layer.padding_idx,
            mode=layer.bag,
            include_last_offset=layer.include_last_offset,
            unknown=unknown,
        )


def model_part(
    framework: Framework, definition: ModelDefinition, spec: JobSpec, tables: TrainedTables
) -> tuple[ModelPart, list[str]]:
    """Return what an export says of a job's model, and which of its state was not trained.

    Such state is buffers and frozen parameters, which are on no server: it comes from the saved
    file in the job's ``output``, or else has the values that the model file gives it.

    Raises:
        ConfigError: The model file is wrong.
        InvalidRequest: The tables are of another model.
    """
    model, untrained = _trained(framework, definition, spec, tables, spec.model_from or spec.name)
    layers = _layers_of(framework, model)
    known = {table.name for table in tables.sparse}
    for layer in layers:
        if layer.table not in known:
            raise InvalidRequest(f"{tables.where} has no table {layer.table!r}")
    view = framework.tensors.view
    state = {name: view(tensor) for name, tensor in _state_here(framework, model).items()}
    return ModelPart(framework.name, layers, state), untrained


def _trained(
    framework: Framework,
    definition: ModelDefinition,
    spec: JobSpec,
    tables: TrainedTables,
    job: str,
) -> tuple[Module, list[str]]:
    """Make a job's model as its workers do, with its saved state.

    Returns:
        The model, whose layers ask servers; and the names of the state that no optimizer has
        trained and that was not saved.
    """
    with offline(tables, job) as session:
        model = build(framework, definition, session.client, spec).model
    trained = {
        name
        for name, parameter in framework.parameters(model).items()
        if framework.tensors.trains(parameter)
    }
    state = _state_here(framework, model)
    untrained = [name for name in state if name not in trained]
    saved = _saved(framework, spec.output) if untrained else {}
    found = {name: saved[name] for name in untrained if name in saved}
    _assign(framework.tensors, state, found)
    return model, [name for name in untrained if name not in saved]


def _state_here(framework: Framework, model: Module) -> dict[str, Tensor]:
    """Return the state of a model but for rows that are on servers."""
    handles = {f"{layer.path}.handle".lstrip(".") for layer in _layers_of(framework, model)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of these rows
        state = framework.state(model)
    return {name: tensor for name, tensor in state.items() if name not in handles}


def _assign(own: Tensors, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Give tensors values, which are tensors or arrays, by name."""
    for name, value in values.items():
        array = own.view(value) if isinstance(value, own.kind) else np.array(value)
        own.assign(tensors[name], array)


def _saved(framework: Framework, output: str) -> Mapping[str, Any]:
    """Return what the end of training saved in a job's ``output``; empty: nothing."""
    if not output:
        return {}
    try:
        files, root = fsspec.core.url_to_fs(output)
        if not files.exists(f"{root}/{framework.saved_file}"):
            return {}
        return framework.read(files.cat_file(f"{root}/{framework.saved_file}"))
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointUnavailable(f"output: {output}: {error}") from error


def _layers_of(framework: Framework, model: Module) -> tuple[ModelLayer, ...]:
    described = (_layer_of(path, module) for path, module in _places(framework, model))
    return tuple(layer for layer in described if layer is not None)


def _places(framework: Framework, module: Module, path: str = "") -> Iterator[tuple[str, Module]]:
    """Yield every place of a module in a model; one that is shared has several."""
    yield path, module
    for name, child in framework.children(module).items():
        yield from _places(framework, child, f"{path}.{name}" if path else name)


def _layer_of(path: str, module: Module) -> ModelLayer | None:
    """Describe a layer whose rows are on servers; None if it is not one."""
    if isinstance(module, EmbeddingBag):
        last = module.include_last_offset
        return ModelLayer(path, module.table_name, module.mode, module.padding_idx, last)
    if isinstance(module, Embedding):
        return ModelLayer(path, module.table_name, padding_idx=module.padding_idx)
    return None


class _DenseValues:
    """The dense parameters of a model that is followed: renewed before it computes."""

    def __init__(self, follower: Follower, groups: Sequence[DenseGroup]) -> None:
        self._follower = follower
        self._groups = groups
        self._version = 0
        self._lock = threading.Lock()

    def renew(self) -> None:
        """Load what is newer than at the last call."""
        if self._version == self._follower.version:
            return
        with self._lock:
            self._version = self._follower.version
            for group in self._groups:
                group.load(self._follower.dense(group.table_name))
