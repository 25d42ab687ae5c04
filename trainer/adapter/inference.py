"""Makes a trained model for inference: the steps that are alike in every framework.

A framework says in :class:`Framework` how its models are taken apart. May import
``backstay.checkpoint``, ``backstay.serving``, the session without servers and the model file; knows
no framework.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import fsspec
import numpy as np
from numpy.typing import NDArray

from backstay.checkpoint.export import ModelLayer, ModelPart
from backstay.checkpoint.export_reader import RowsByKey, Unknown
from backstay.checkpoint.trained import TrainedTables, open_trained
from backstay.errors import CheckpointUnavailable, ConfigError
from backstay.job.asked_model import asked_model
from backstay.job.model_definition import ModelDefinition
from backstay.job_spec import JobSpec
from backstay.serving import Follower
from backstay.trainer.adapter.dense import DenseGroup, made_groups
from backstay.trainer.adapter.offline import job_of, offline, warn_untrained
from backstay.trainer.client import Client

__all__ = ["Framework", "load_for_inference", "model_part"]


class Framework(Protocol):
    """What loading needs to know of a framework.

    Attributes:
        name: As in an export.
        module: The class of its models and layers, in words for errors: "a torch.nn.Module".
        saved_file: What the end of training saves in a job's ``output``.
    """

    name: str
    module: str
    saved_file: str

    def is_module(self, made: Any) -> bool:
        """Tell whether this is a model or a layer."""

    def fresh_names(self) -> AbstractContextManager[Any]:
        """Number layers and parameters in this block as a new process does."""

    def build(self, definition: ModelDefinition, client: Client | None, spec: JobSpec, /) -> Any:
        """Make a job's program, with its model and optimizer, as a worker does."""

    def children(self, module: Any) -> Mapping[str, Any]:
        """Return the modules right below a module, by name."""

    def layer(self, path: str, module: Any) -> ModelLayer | None:
        """Describe a layer whose rows are on servers; None if it is not one."""

    def trained_names(self, model: Any) -> set[str]:
        """Return the names of the parameters that an optimizer trains."""

    def state(self, model: Any) -> dict[str, NDArray[Any]]:
        """Return ``state_dict()`` in numpy."""

    def load_state(self, model: Any, state: Mapping[str, NDArray[Any]], where: str) -> None:
        """Load all of a model's state.

        Raises:
            ConfigError: It is of another model; the message says that it came from ``where``.
        """

    def read_saved(self, content: bytes) -> dict[str, Any]:
        """Read ``saved_file``."""

    def load_saved(self, model: Any, values: Mapping[str, Any]) -> None:
        """Load some of a model's state from what ``saved_file`` has."""

    def mapped(self, table: RowsByKey, layer: ModelLayer, unknown: Unknown) -> Any:
        """Make a layer that looks the rows up in the file of an export."""

    def before_forward(self, model: Any, call: Callable[[], None]) -> None:
        """Call this whenever the model is about to compute."""


def load_for_inference(
    framework: Framework,
    model: Any,
    source: str | Path,
    *,
    job: str | None,
    model_params: Mapping[str, Any] | None,
    unknown: Unknown,
    follow: bool,
) -> Any:
    """Return a trained model in evaluation mode; the frameworks' functions say the rest."""
    if not follow:
        with open_trained(source) as tables:
            return _loaded(framework, model, tables, job, model_params, unknown)
    follower = Follower(source)
    try:
        with made_groups() as groups:
            made = _loaded(framework, model, follower, job, model_params, unknown)
        framework.before_forward(made, _DenseValues(follower, groups).renew)
    except BaseException:
        follower.close()
        raise
    made.follower = follower
    return made


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


def _loaded(
    framework: Framework,
    model: Any,
    tables: TrainedTables,
    job: str | None,
    model_params: Mapping[str, Any] | None,
    unknown: Unknown,
) -> Any:
    part = tables.model
    if framework.is_module(model):
        if part is None:
            raise ConfigError(
                f"{tables.where} does not say which tables a model has: pass the model file or a "
                "function that makes the model and its optimizer, or make an export of a job with "
                "`backstay export`"
            )
        return _filled(framework, model, part, tables, unknown)
    make: Callable[[], Any] = model
    if isinstance(model, str | Path):
        definition, spec, job = asked_model(
            model, job=job, only_job=lambda: job_of(tables), model_params=model_params
        )
        if part is None:
            made, _, untrained = _trained(framework, definition, spec, tables, job, unknown)
            if untrained:
                warn_untrained(untrained, framework.saved_file)
            return made
        make = definition.make_model
    job = job_of(tables) if job is None else job
    with offline(tables, job), framework.fresh_names():
        made = make()
    if not framework.is_module(made):
        raise ConfigError(f"the model is a {type(made).__name__}, not {framework.module}")
    if part is not None:
        return _filled(framework, made, part, tables, unknown)
    return _with_rows(framework, made, _layers_of(framework, made), tables, unknown)


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
    job = spec.model_from or spec.name
    model, layers, untrained = _trained(framework, definition, spec, tables, job, "initial")
    return ModelPart(framework.name, layers, framework.state(model)), untrained


def _trained(
    framework: Framework,
    definition: ModelDefinition,
    spec: JobSpec,
    tables: TrainedTables,
    job: str,
    unknown: Unknown,
) -> tuple[Any, tuple[ModelLayer, ...], list[str]]:
    """Make a job's model as its workers do, with the rows of trained tables and its saved state.

    Returns:
        The model; its layers whose rows were on servers; and the names of the state that no
        optimizer has trained and that was not saved.
    """
    with offline(tables, job) as session:
        model = framework.build(definition, session.client, spec).model
    layers = _layers_of(framework, model)
    handles = {f"{layer.path}.handle".lstrip(".") for layer in layers}
    trains = framework.trained_names(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows that are not in state_dict()
        names = list(model.state_dict())
    untrained = [name for name in names if name not in trains | handles]
    saved = _saved(framework, spec.output) if untrained else {}
    framework.load_saved(model, {name: saved[name] for name in untrained if name in saved})
    model = _with_rows(framework, model, layers, tables, unknown)
    return model, layers, [name for name in untrained if name not in saved]


def _layers_of(framework: Framework, model: Any) -> tuple[ModelLayer, ...]:
    described = (framework.layer(path, module) for path, module in _places(framework, model))
    return tuple(layer for layer in described if layer is not None)


def _places(framework: Framework, module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every place of a module in a model; one that is shared has several."""
    yield path, module
    for name, child in framework.children(module).items():
        yield from _places(framework, child, f"{path}.{name}" if path else name)


def _filled(
    framework: Framework, model: Any, part: ModelPart, tables: TrainedTables, unknown: Unknown
) -> Any:
    """Put an exported model's rows and state into a model."""
    model = _with_rows(framework, model, part.layers, tables, unknown)
    state = {name: np.array(value) for name, value in part.state.items()}
    framework.load_state(model, state, tables.where)
    return model


def _with_rows(
    framework: Framework,
    model: Any,
    layers: Sequence[ModelLayer],
    tables: TrainedTables,
    unknown: Unknown,
) -> Any:
    for layer in layers:
        rows = framework.mapped(tables.table(layer.table), layer, unknown)
        above, _, name = layer.path.rpartition(".")
        if not name:
            model = rows
            continue
        parent = model
        for step in above.split(".") if above else ():
            parent = framework.children(parent).get(step)
            if parent is None:
                raise ConfigError(f"the model has no {above!r}, where {name!r} should be")
        if name not in framework.children(parent):
            raise ConfigError(f"the model has no layer {layer.path!r}")
        setattr(parent, name, rows)
    model.eval()
    return model


def _saved(framework: Framework, output: str) -> dict[str, Any]:
    """Return what the end of training saved in a job's ``output``; empty: nothing."""
    if not output:
        return {}
    try:
        files, root = fsspec.core.url_to_fs(output)
        if not files.exists(f"{root}/{framework.saved_file}"):
            return {}
        return framework.read_saved(files.cat_file(f"{root}/{framework.saved_file}"))
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointUnavailable(f"output: {output}: {error}") from error
