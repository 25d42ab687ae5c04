"""A user's model file: loaded, and checked before anything begins.

``docs/guide/model.md`` is the contract as users read it. Runs the file's code; imports no
framework of its own and knows no cluster.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from backstay.errors import ConfigError
from backstay.job.callbacks import Callback
from backstay.job.metrics import METRICS, Metric
from backstay.job.tracebacks import HEADER, frames_within

__all__ = ["EVALUATION", "PREDICTION", "TRAINING", "Mode", "ModelDefinition", "load"]

Mode = Literal["training", "evaluation", "prediction"]
TRAINING: Mode = "training"
EVALUATION: Mode = "evaluation"
PREDICTION: Mode = "prediction"

# What a function of the file should look like, for messages.
SHAPES: Mapping[str, str] = {
    "custom_model": "def custom_model(**params): return a paddle.nn.Layer or a torch.nn.Module",
    "loss": "def loss(labels, predictions): return a tensor of one number",
    "optimizer": (
        "def optimizer(parameters): return paddle.optimizer.Adam(1e-3, parameters=parameters), "
        "or torch.optim.Adam(parameters, lr=1e-3); with (parameters, model) it may return several"
    ),
    "clip_gradients": (
        "def clip_gradients(parameters): torch.nn.utils.clip_grad_norm_(parameters, 1.0)"
    ),
    "clicks": "def clicks(labels): return labels  # one number for each record",
    "feed": (
        "def feed(records, mode, metadata): return features, labels (for mode 'prediction': "
        "features)"
    ),
    "eval_metrics": "def eval_metrics(): return {'auc': 'auc'}",
    "callbacks": "def callbacks(**params): return [LearningRateScheduler(...)]",
    "custom_data_reader": "def custom_data_reader(data_origin, **options): return a reader",
    "PredictionOutputsProcessor": (
        "class PredictionOutputsProcessor: def process(self, predictions, worker_id)"
    ),
}
# Other names for the same thing.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "custom_model": ("custom_model", "model"),
    "eval_metrics": ("eval_metrics", "eval_metrics_fn"),
}
FRAMEWORKS = ("paddle", "torch")
KERAS_HINT = (
    "TensorFlow does not run here, and Keras does on PyTorch: use Keras 3 with KERAS_BACKEND=torch "
    "(workers.env of the job, and the shell for --local), loss and optimizer of PyTorch; or write "
    "the model in Paddle or PyTorch"
)
TRACE_LINES_MAX = 40


@dataclass(frozen=True)
class ModelDefinition:
    """What a model file defines, checked.

    Attributes:
        path: The file.
        module: The file, loaded.
        make_model: Without arguments: those of the job are bound.
        loss: Of (labels, predictions), both tensors of the framework.
        optimizer: Of the model's parameters and the model.
        clip_gradients: Of the model's parameters; or None.
        clicks: Of the labels, as ``feed`` returns them: clicks of each record; or None.
        feed: Of (records, mode, metadata).
        metrics: By name: one of ``backstay.job.metrics.METRICS``, or a function.
        make_callbacks: Without arguments: those of the job are bound.
        custom_data_reader: Or None.
        prediction_outputs_processor: The class, or None.
        new_frameworks: Frameworks that loading the file was the first to import.
    """

    path: Path
    module: ModuleType
    make_model: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[..., Any]
    clip_gradients: Callable[[Any], Any] | None
    clicks: Callable[[Any], Any] | None
    feed: Callable[[Any, Mode, Any], Any]
    metrics: Mapping[str, str | Metric]
    make_callbacks: Callable[[], list[Callback]]
    custom_data_reader: Callable[..., Any] | None
    prediction_outputs_processor: type | None
    new_frameworks: frozenset[str]

    def framework(self, wanted: str = "auto") -> str:
        """Return ``paddle`` or ``torch``, without making a model.

        Args:
            wanted: ``framework`` of the job; "auto" goes by what the file uses.

        Raises:
            ConfigError: It cannot be told.
        """
        if wanted != "auto":
            return wanted
        found = {name for name in FRAMEWORKS if _uses(self.module, name)} or self.new_frameworks
        if len(found) == 1:
            return min(found)
        if not found and (_uses(self.module, "keras") or _uses(self.module, "tensorflow")):
            raise ConfigError(f"{self.path}: {KERAS_HINT}")
        which = "both Paddle and PyTorch" if found else "neither Paddle nor PyTorch"
        raise ConfigError(
            f"{self.path}: it imports {which}; set the job's framework to 'paddle' or 'torch'"
        )


def load(
    path: str | Path,
    *,
    model_params: Mapping[str, Any] | None = None,
    callback_params: Mapping[str, Any] | None = None,
) -> ModelDefinition:
    """Run a model file and check what it defines.

    Files beside it can be imported by it, as when Python runs it itself.

    Args:
        path: A .py file.
        model_params: Arguments of its ``custom_model``.
        callback_params: Arguments of its ``callbacks``.

    Raises:
        ConfigError: The file is missing or fails, a function is missing, or has other arguments;
            the message says what it should look like.
    """
    file = Path(path)
    before = {name for name in FRAMEWORKS if name in sys.modules}
    module = _run(file)
    model_params, callback_params = dict(model_params or {}), dict(callback_params or {})
    model = _function(file, module, "custom_model", [], model_params)
    loss = _function(file, module, "loss", ["labels", "predictions"])
    optimizer = _optimizer(file, module)
    feed = _function(file, module, "feed", ["records", "mode", "metadata"])
    callbacks = _optional(file, module, "callbacks", [], callback_params)
    return ModelDefinition(
        path=file,
        module=module,
        make_model=lambda: model(**model_params),
        loss=loss,
        optimizer=optimizer,
        clip_gradients=_optional(file, module, "clip_gradients", ["parameters"]),
        clicks=_optional(file, module, "clicks", ["labels"]),
        feed=feed,
        metrics=_metrics(file, module),
        make_callbacks=lambda: _callbacks(file, callbacks, callback_params),
        custom_data_reader=_optional(file, module, "custom_data_reader", None),
        prediction_outputs_processor=_processor(file, module),
        new_frameworks=frozenset(
            name for name in FRAMEWORKS if name in sys.modules and name not in before
        ),
    )


def user_traceback(error: BaseException, path: Path) -> str:
    """Return an error's traceback from the first frame of the user's file on.

    All of it where no frame is the user's. Of one that is too long, frames of libraries and of the
    middle are left out.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError):
        # It names file and line itself; the frames are those of Python's import.
        return "".join(traceback.format_exception_only(error))
    own = [number for number, frame in enumerate(frames) if Path(frame.filename) == path.resolve()]
    said = "".join(traceback.format_exception_only(error))
    shown = list(frames[own[0] :] if own else frames)
    text = frames_within(shown, TRACE_LINES_MAX - _lines_of(said), _lines_of) + said
    return "".join(text.splitlines(keepends=True)[-TRACE_LINES_MAX:])


def _lines_of(text: str) -> int:
    return text.count("\n")


def _whole_traceback(error: BaseException, file: Path) -> str:
    """Return the user's traceback as Python begins it."""
    head = "" if isinstance(error, SyntaxError) else HEADER
    return head + user_traceback(error, file)


def is_users(error: BaseException, path: Path) -> bool:
    """Return whether an error came through the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename) == path.resolve() for frame in frames)


def _run(file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"model: there is no file {file}")
    resolved = file.resolve()
    folder = str(resolved.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # The file's own name may be that of another module, so it is not used.
    name = f"backstay_model_{resolved.stem}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        text = f"model: {file} cannot be loaded:\n{_whole_traceback(error, file)}"
        if isinstance(error, ModuleNotFoundError) and error.name == "tensorflow":
            text += KERAS_HINT
        raise ConfigError(text) from error
    return module


def _find(module: ModuleType, name: str) -> tuple[str, Any]:
    """Return the name under which the file has it, and the thing; ("", None): it has not."""
    for alias in ALIASES.get(name, (name,)):
        if hasattr(module, alias):
            return alias, getattr(module, alias)
    return "", None


def _function(
    file: Path,
    module: ModuleType,
    name: str,
    arguments: Sequence[str],
    keywords: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    found, function = _find(module, name)
    if not found:
        own = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        near = difflib.get_close_matches(name, own, 1)
        hint = f" (is {near[0]!r} meant to be it?)" if near else ""
        raise ConfigError(
            f"model: {file} has no function {name!r}{hint}; it should look like: {SHAPES[name]}"
        )
    if not callable(function):
        raise ConfigError(
            f"model: {found!r} in {file} is a {type(function).__name__}, not a function; it "
            f"should look like: {SHAPES[name]}"
        )
    _check_arguments(file, found, name, function, arguments, keywords or {})
    return function  # type: ignore[no-any-return]


def _check_arguments(
    file: Path,
    found: str,
    name: str,
    function: Callable[..., Any],
    arguments: Sequence[str],
    keywords: Mapping[str, Any],
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # built in: Python cannot tell
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        given = ", ".join([*arguments, *(f"{key}=..." for key in keywords)])
        source = " (from the job's params)" if keywords else ""
        raise ConfigError(
            f"model: {found}{signature} in {file} cannot be called as {found}({given}){source}: "
            f"{error}; it should look like: {SHAPES[name]}"
        ) from None


def _optimizer(file: Path, module: ModuleType) -> Callable[..., Any]:
    """Return the file's ``optimizer`` as a function of the parameters and the model."""
    wants_model = _names_model(_find(module, "optimizer")[1])
    arguments = ["parameters", "model"] if wants_model else ["parameters"]
    function = _function(file, module, "optimizer", arguments)
    _refuse_rate_first(file, function)
    if wants_model:
        return lambda parameters, model=None: function(parameters, model=model)
    return lambda parameters, model=None: function(parameters)


def _names_model(function: Any) -> bool:
    try:
        return "model" in list(inspect.signature(function).parameters)[1:]
    except (TypeError, ValueError):
        return False


def _refuse_rate_first(file: Path, optimizer: Callable[..., Any]) -> None:
    """Refuse ``optimizer(lr=0.1)``: the parameters would be taken for the rate."""
    try:
        first = next(iter(inspect.signature(optimizer).parameters.values()))
    except (TypeError, ValueError):
        return
    positional = (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    if first.kind in positional and isinstance(first.default, int | float | str):
        raise ConfigError(
            f"model: the first argument of 'optimizer' in {file}, {first.name!r}, has a default: "
            f"it is given the model's parameters; it should look like: {SHAPES['optimizer']}"
        )


def _optional(
    file: Path,
    module: ModuleType,
    name: str,
    arguments: Sequence[str] | None,
    keywords: Mapping[str, Any] | None = None,
) -> Callable[..., Any] | None:
    found, function = _find(module, name)
    if not found:
        if keywords:
            raise ConfigError(
                f"model: the job has arguments for {name!r} ({', '.join(keywords)}), and {file} "
                f"has no such function; it should look like: {SHAPES[name]}"
            )
        return None
    if arguments is not None:
        return _function(file, module, name, arguments, keywords)
    if not callable(function):
        raise ConfigError(f"model: {found!r} in {file} is not a function; {SHAPES[name]}")
    return function  # type: ignore[no-any-return]


def _metrics(file: Path, module: ModuleType) -> dict[str, str | Metric]:
    found, _ = _find(module, "eval_metrics")
    function = _optional(file, module, "eval_metrics", [])
    if function is None:
        return {}
    metrics = _call(file, found, function)
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"model: {found} in {file} returned a {type(metrics).__name__}; it should look like: "
            f"{SHAPES['eval_metrics']}"
        )
    for name, metric in metrics.items():
        if isinstance(metric, str) and metric not in METRICS:
            raise ConfigError(
                f"model: {found} in {file}: {name!r} is {metric!r}, which is none of "
                f"{', '.join(METRICS)}; a function of (labels, predictions) will do, too"
            )
        if not isinstance(metric, str) and not callable(metric):
            raise ConfigError(
                f"model: {found} in {file}: {name!r} is a {type(metric).__name__}; it must be one "
                f"of {', '.join(METRICS)} or a function of (labels, predictions)"
            )
    return dict(metrics)


def _callbacks(
    file: Path, function: Callable[..., Any] | None, params: Mapping[str, Any]
) -> list[Callback]:
    if function is None:
        return []
    made = _call(file, "callbacks", lambda: function(**params))
    members = list(made) if isinstance(made, list | tuple) else [made]
    for member in members:
        if not isinstance(member, Callback):
            raise ConfigError(
                f"model: callbacks in {file} returned a {type(member).__name__}; it must return a "
                "list of backstay.job.callbacks.Callback"
            )
    return members


def _processor(file: Path, module: ModuleType) -> type | None:
    processor = getattr(module, "PredictionOutputsProcessor", None)
    if processor is None:
        return None
    shape = SHAPES["PredictionOutputsProcessor"]
    process = getattr(processor, "process", None)
    if not isinstance(processor, type) or not callable(process):
        raise ConfigError(
            f"model: PredictionOutputsProcessor in {file} is not a class with a method 'process'; "
            f"it should look like: {shape}"
        )
    arguments = ["self", "predictions", "worker_id"]
    _check_arguments(file, "process", "PredictionOutputsProcessor", process, arguments, {})
    return processor


def _call(file: Path, name: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise ConfigError(
            f"model: {name} in {file} failed:\n{_whole_traceback(error, file)}"
        ) from error


def _uses(module: ModuleType, framework: str) -> bool:
    """Return whether a name in the file belongs to the framework, or a class of it does."""
    for value in vars(module).values():
        owner = value.__name__ if isinstance(value, ModuleType) else _owner(value)
        owners = [owner]
        if isinstance(value, type):
            owners += [base.__module__ for base in value.__mro__]
        adapter = f"backstay.trainer.{framework}"
        if any(o.split(".")[0] == framework or o.startswith(adapter) for o in owners):
            return True
    return False


def _owner(value: Any) -> str:
    owner = getattr(value, "__module__", "")
    return owner if isinstance(owner, str) else ""
