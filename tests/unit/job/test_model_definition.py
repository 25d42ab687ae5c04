"""A model file that is right is taken; one that is wrong is told what it should look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backstay.errors import ConfigError
from backstay.job.callbacks import LearningRateScheduler
from backstay.job.model_definition import (
    TRACE_LINES_MAX,
    ModelDefinition,
    load,
    user_traceback,
)

# No framework: what is checked is the file, not the model.
WHOLE = {
    "custom_model": "def custom_model(width=2):\n    return ('model', width)\n",
    "loss": "def loss(labels, predictions):\n    return labels - predictions\n",
    "optimizer": "def optimizer(parameters):\n    return ('sgd', parameters)\n",
    "feed": "def feed(records, mode, metadata):\n    return records, mode\n",
}


def loaded(folder: Path, changes: dict[str, str] | None = None, **params: Any) -> ModelDefinition:
    """Write and load a file: the whole one, with some of its parts changed."""
    file = folder / "user_model.py"
    file.write_text("\n".join({**WHOLE, **(changes or {})}.values()), encoding="utf-8")
    return load(file, **params)


def test_a_whole_file(tmp_path: Path) -> None:
    definition = loaded(tmp_path, model_params={"width": 5})
    assert definition.make_model() == ("model", 5)
    assert definition.optimizer([1]) == ("sgd", [1])
    assert definition.feed([2], "training", None) == ([2], "training")
    assert definition.metrics == {}
    assert definition.make_callbacks() == []
    assert definition.custom_data_reader is None
    assert definition.prediction_outputs_processor is None


def test_an_optimizer_may_ask_for_the_model(tmp_path: Path) -> None:
    asks = "def optimizer(parameters, model):\n    return (parameters, model)\n"
    assert loaded(tmp_path, {"optimizer": asks}).optimizer([1], "mine") == ([1], "mine")
    clips = "def clip_gradients(parameters):\n    return parameters\n"
    definition = loaded(tmp_path, {"clip": clips})
    assert definition.optimizer([1], "mine") == ("sgd", [1])
    assert definition.clip_gradients is not None
    with pytest.raises(ConfigError, match=r"clip_gradients\(\) .*cannot be called"):
        loaded(tmp_path, {"clip": "def clip_gradients():\n    return 1\n"})


def test_names_that_elasticdl_users_know(tmp_path: Path) -> None:
    definition = loaded(
        tmp_path,
        {
            "custom_model": "def model():\n    return 'mine'\n",
            "metrics": "def eval_metrics_fn():\n"
            "    return {'auc': 'auc', 'own': lambda a, b: 1.0}\n",
            "processor": "class PredictionOutputsProcessor:\n"
            "    def process(self, predictions, worker_id):\n        pass\n",
            "callbacks": "from backstay.job.callbacks import LearningRateScheduler\n"
            "def callbacks(rate):\n    return [LearningRateScheduler(lambda step: rate)]\n",
        },
        callback_params={"rate": 0.5},
    )
    assert definition.make_model() == "mine"
    assert set(definition.metrics) == {"auc", "own"}
    assert isinstance(definition.make_callbacks()[0], LearningRateScheduler)
    assert definition.prediction_outputs_processor is not None


def test_files_beside_it_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "beside_user_model.py").write_text("ANSWER = 42\n", encoding="utf-8")
    changed = {"custom_model": "import beside_user_model\ndef custom_model():\n    return 42\n"}
    assert loaded(tmp_path, changed).make_model() == 42


@pytest.mark.parametrize("name", WHOLE)
def test_a_missing_function_is_named_with_its_shape(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"no function '{name}'.*def {name}\("):
        loaded(tmp_path, {name: ""})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "def losss(a, b):\n    return a\n"}, "is 'losss' meant to be it"),
        ({"loss": "loss = 3\n"}, "'loss' in .* is a int, not a function"),
        ({"loss": "def loss(labels):\n    return labels\n"}, r"loss\(labels\).* cannot be called"),
        ({"feed": "def feed(records):\n    return records\n"}, "def feed.records, mode, metadata"),
        ({"optimizer": "def optimizer(lr=0.1):\n    return lr\n"}, "given the model's parameters"),
        ({"m": "def eval_metrics():\n    return ['auc']\n"}, "returned a list"),
        ({"m": "def eval_metrics():\n    return {'a': 'auk'}\n"}, "'a' is 'auk', which is none of"),
        ({"m": "def eval_metrics():\n    return {'a': 3}\n"}, "'a' is a int"),
        ({"m": "def eval_metrics():\n    return 1 / 0\n"}, "(?s)eval_metrics .*ZeroDivisionError"),
        ({"p": "class PredictionOutputsProcessor:\n    pass\n"}, "not a class with a method"),
        (
            {"p": "class PredictionOutputsProcessor:\n    def process(self):\n        pass\n"},
            "process.*cannot be called",
        ),
        ({"x": "import no_such_module_at_all\n"}, "(?s)cannot be loaded.*no_such_module_at_all"),
        ({"x": "def broken(:\n"}, "(?s)cannot be loaded.*SyntaxError"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, changes)


def test_wrong_params_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"from the job's params.*unexpected keyword.*height"):
        loaded(tmp_path, model_params={"height": 1})
    with pytest.raises(ConfigError, match=r"has arguments for 'callbacks'.*no such function"):
        loaded(tmp_path, callback_params={"rate": 1})


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*nothing\.py"):
        load(tmp_path / "nothing.py")


def test_callbacks_of_the_wrong_kind(tmp_path: Path) -> None:
    definition = loaded(tmp_path, {"callbacks": "def callbacks():\n    return [3]\n"})
    with pytest.raises(ConfigError, match=r"callbacks .* returned a int"):
        definition.make_callbacks()


@pytest.mark.parametrize("framework", ["paddle", "torch"])
def test_the_framework_is_that_of_the_file(tmp_path: Path, framework: str) -> None:
    pytest.importorskip(framework)
    changed = {"custom_model": f"import {framework}\ndef custom_model():\n    return 1\n"}
    assert loaded(tmp_path, changed).framework() == framework
    assert loaded(tmp_path, changed).framework("torch") == "torch"


def test_a_class_of_another_file_tells_the_framework(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    beside = "import torch\nclass Net(torch.nn.Module):\n    pass\n"
    (tmp_path / "beside_with_net.py").write_text(beside, encoding="utf-8")
    changed = {
        "custom_model": "from beside_with_net import Net\ndef custom_model():\n    return 1\n"
    }
    assert loaded(tmp_path, changed).framework() == "torch"


def test_no_framework_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither Paddle nor PyTorch; set the job's framework"):
        loaded(tmp_path).framework()


def test_a_users_error_shows_the_users_lines(tmp_path: Path) -> None:
    definition = loaded(tmp_path, {"loss": "def loss(labels, predictions):\n    return 1 / 0\n"})
    with pytest.raises(ZeroDivisionError) as caught:
        definition.loss(1, 2)
    text = user_traceback(caught.value, definition.path)
    assert text.splitlines()[0].strip().startswith(f'File "{definition.path.resolve()}"')
    assert "return 1 / 0" in text
    assert text.rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_file_that_fails_is_told_with_its_traceback_from_its_own_frames_on(
    tmp_path: Path,
) -> None:
    inner = "\n".join(f"def f{n}():\n    return f{n + 1}()" for n in range(40))
    changed = {"x": f"{inner}\ndef f40():\n    raise ValueError('a fault')\nf0()\n"}
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, changed)
    first, second, third, *_, last = str(caught.value).splitlines()
    assert first.endswith("cannot be loaded:")
    assert second == "Traceback (most recent call last):"
    assert third.endswith(", in <module>")
    assert last == "ValueError: a fault"
    # Of too many frames those in the middle are missing, not the user's first ones.
    assert "frames left out]" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= TRACE_LINES_MAX + 2
