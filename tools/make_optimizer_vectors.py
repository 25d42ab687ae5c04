"""Write tests/vectors/optimizers.json: what other implementations make of the same gradients.

The vectors are committed; this is run by hand when cases change. The two frameworks do not
live well in one environment, so each call replaces the cases of the sources it is given::

    python tools/make_optimizer_vectors.py paddle   # needs paddlepaddle and numpy
    python tools/make_optimizer_vectors.py torch    # needs torch and numpy
    python tools/make_optimizer_vectors.py ftrl rowwise decay groupftrl   # needs numpy

Paddle and PyTorch cases come from the frameworks' own optimizers on the CPU in float32; those
that neither has are written here in float64 from their sources. Imports nothing of backstay:
the numbers must not depend on the code that they judge.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Case = dict[str, Any]
# Takes (initial weights, gradients [steps, rows, dim], learning rate scale of each step) and
# returns the weights after each step.
Trainer = Callable[[Array, Array, list[float]], list[Array]]

TARGET = Path(__file__).resolve().parent.parent / "tests" / "vectors" / "optimizers.json"
STEPS, ROWS, DIM = 12, 3, 6
RECORDED_STEPS = (1, 2, 12)
CONSTANT = [1.0] * STEPS
DECAYING = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.1, 0.05]
# Paddle's and PyTorch's settings in common. The second has an epsilon that matters.
ADAMS: list[dict[str, Any]] = [
    {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    {"learning_rate": 0.01, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3},
]
ADAMAXES: list[dict[str, Any]] = [
    {"learning_rate": 0.002, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    {"learning_rate": 0.01, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3},
]
ADADELTAS: list[dict[str, Any]] = [
    {"learning_rate": 1.0, "rho": 0.9, "epsilon": 1e-6},
    {"learning_rate": 0.5, "rho": 0.95, "epsilon": 1e-3},
]
# Momentum, and whether centred.
RMSPROPS = [(0.0, False), (0.9, False), (0.0, True), (0.5, True)]


def inputs() -> tuple[Array, Array]:
    """Return initial weights [rows, dim] and gradients [steps, rows, dim], float32.

    Row 0 has tiny gradients, row 2 large ones. Element 0 always has gradient 0 and element 1
    always 1, the corner cases of adaptive step sizes.
    """
    generator = np.random.default_rng(20130811)
    weights = generator.uniform(-1, 1, (ROWS, DIM)).astype(np.float32)
    gradients = generator.normal(0, 1, (STEPS, ROWS, DIM))
    gradients *= np.array([1e-3, 1.0, 20.0])[:, None]
    gradients[:, :, 0] = 0.0
    gradients[:, :, 1] = 1.0
    return weights, gradients.astype(np.float32)


def train_paddle(make: Callable[..., Any], base_rate: float) -> Trainer:
    """Train with the paddle optimizer that ``make(parameters=[...])`` builds."""
    import paddle

    def train(weights: Array, gradients: Array, scales: list[float]) -> list[Array]:
        parameter = paddle.create_parameter(list(weights.shape), "float32")
        parameter.set_value(weights)
        optimizer = make(parameters=[parameter])
        after = []
        for gradient, scale in zip(gradients, scales, strict=True):
            optimizer.set_lr(base_rate * scale)
            (parameter * paddle.to_tensor(gradient)).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
            after.append(np.array(parameter.numpy(), copy=True))
        return after

    return train


def paddle_cases() -> Iterator[tuple[str, Case, Trainer, list[float]]]:
    """Yield (source, optimizer's JSON, trainer, learning rate scales) of each paddle case."""
    import paddle
    from paddle import optimizer as po

    paddle.set_device("cpu")
    source = f"paddle {paddle.__version__}"

    def case(
        name: str, settings: dict[str, Any], scales: list[float], make: Callable[..., Any]
    ) -> tuple[str, Case, Trainer, list[float]]:
        return source, {name: settings}, train_paddle(make, settings["learning_rate"]), scales

    yield case("sgd", {"learning_rate": 0.05}, DECAYING, partial(po.SGD, 0.05))
    for nesterov in (False, True):
        yield case(
            "momentum",
            {"learning_rate": 0.01, "momentum": 0.9, "nesterov": nesterov},
            DECAYING,
            partial(po.Momentum, 0.01, 0.9, use_nesterov=nesterov),
        )
    for epsilon, accumulator in ((1e-6, 0.0), (1e-10, 0.1)):
        yield case(
            "adagrad",
            {"learning_rate": 0.05, "epsilon": epsilon, "initial_accumulator": accumulator},
            DECAYING,
            partial(po.Adagrad, 0.05, epsilon, initial_accumulator_value=accumulator),
        )
    for adam in ADAMS:
        adamw = {**adam, "weight_decay": 0.05}
        yield case("adam", adam, DECAYING, partial(po.Adam, **adam))
        yield case("adamw", adamw, DECAYING, partial(po.AdamW, **adamw))
        yield case("amsgrad", adam, DECAYING, partial(po.Adam, **adam, amsgrad=True))
        yield case("amsgrad", adamw, DECAYING, partial(po.AdamW, **adamw, amsgrad=True))
    for adamax in ADAMAXES:
        settings = {**adamax, "epsilon_on_maximum": True}
        yield case("adamax", settings, DECAYING, partial(po.Adamax, **adamax))
    for adadelta in ADADELTAS:
        yield case("adadelta", adadelta, DECAYING, partial(po.Adadelta, **adadelta))
    # Its accumulator is 1 - decay times ours.
    rate, decay, epsilon = 0.05, 0.9, 1e-6
    root = math.sqrt(1.0 - decay)
    ours = {
        "learning_rate": rate / root,
        "decay": decay,
        "epsilon": epsilon / root,
        "initial_accumulator": 0.0,
    }
    yield source, {"adagraddecay": ours}, train_paddle_decay(rate, decay, epsilon), DECAYING
    for momentum, centered in RMSPROPS:
        settings = {
            "learning_rate": 0.005,
            "rho": 0.95,
            "epsilon": 1e-6,
            "momentum": momentum,
            "centered": centered,
        }
        # Paddle accumulates the learning rate in the momentum, so it must not change there.
        yield case(
            "rmsprop",
            {**settings, "epsilon_inside_sqrt": True},
            DECAYING if momentum == 0.0 else CONSTANT,
            partial(po.RMSProp, **settings),
        )


def train_paddle_decay(base_rate: float, decay: float, epsilon: float) -> Trainer:
    """Train with Paddle's operator ``decayed_adagrad``, which has no optimizer of its own."""
    import paddle

    def train(weights: Array, gradients: Array, scales: list[float]) -> list[Array]:
        parameter = paddle.to_tensor(weights)
        moment = paddle.zeros_like(parameter)
        after = []
        for gradient, scale in zip(gradients, scales, strict=True):
            rate = paddle.to_tensor([base_rate * scale], "float32")
            parameter, moment = paddle._C_ops.decayed_adagrad(
                parameter, paddle.to_tensor(gradient), moment, rate, decay, epsilon
            )
            after.append(np.array(parameter.numpy(), copy=True))
        return after

    return train


def train_torch(
    make: Callable[..., Any], base_rate: float, sparse_scales: list[float] | None = None
) -> Trainer:
    """Train with the torch optimizer that ``make([...])`` builds.

    With ``sparse_scales``: on sparse gradients, and with these in place of the case's.
    """
    import torch

    def train(weights: Array, gradients: Array, scales: list[float]) -> list[Array]:
        scales = sparse_scales or scales
        parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
        optimizer = make([parameter])
        after = []
        for gradient, scale in zip(gradients, scales, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base_rate * scale
            dense = torch.from_numpy(gradient.copy())
            parameter.grad = dense.to_sparse(1) if sparse_scales else dense
            optimizer.step()
            after.append(parameter.detach().numpy().copy())
        return after

    return train


def torch_cases() -> Iterator[tuple[str, Case, Trainer, list[float]]]:
    """Yield (source, optimizer's JSON, trainer, learning rate scales) of each torch case."""
    import torch
    from torch import optim

    source = f"torch {torch.__version__.partition('+')[0]}"

    def case(
        name: str, settings: dict[str, Any], make: Callable[..., Any]
    ) -> tuple[str, Case, Trainer, list[float]]:
        return source, {name: settings}, train_torch(make, settings["learning_rate"]), DECAYING

    yield case("sgd", {"learning_rate": 0.05}, partial(optim.SGD, lr=0.05))
    for nesterov in (False, True):
        yield case(
            "momentum",
            {"learning_rate": 0.01, "momentum": 0.9, "nesterov": nesterov},
            partial(optim.SGD, lr=0.01, momentum=0.9, nesterov=nesterov),
        )
    for accumulator in (0.0, 0.1):
        yield case(
            "adagrad",
            {"learning_rate": 0.05, "epsilon": 1e-10, "initial_accumulator": accumulator},
            partial(optim.Adagrad, lr=0.05, initial_accumulator_value=accumulator),
        )
    for adam in ADAMS:
        names = {
            "lr": adam["learning_rate"],
            "betas": (adam["beta1"], adam["beta2"]),
            "eps": adam["epsilon"],
        }
        yield case("adam", adam, partial(optim.Adam, **names))
        adamw = {**adam, "weight_decay": 0.05}
        yield case("adamw", adamw, partial(optim.AdamW, weight_decay=0.05, **names))
        yield case("amsgrad", adam, partial(optim.Adam, amsgrad=True, **names))
        largest = partial(optim.AdamW, weight_decay=0.05, amsgrad=True, **names)
        yield case("amsgrad", adamw, largest)
        # SparseAdam counts steps itself; on the servers the scale of the learning rate has them.
        corrected = [
            scale * math.sqrt(1.0 - adam["beta2"] ** step) / (1.0 - adam["beta1"] ** step)
            for step, scale in enumerate(DECAYING, 1)
        ]
        made = partial(optim.SparseAdam, **names)
        trainer = train_torch(made, adam["learning_rate"], sparse_scales=DECAYING)
        yield source, {"adam": {**adam, "steps": "global"}}, trainer, corrected
    for adamax in ADAMAXES:
        names = {
            "lr": adamax["learning_rate"],
            "betas": (adamax["beta1"], adamax["beta2"]),
            "eps": adamax["epsilon"],
        }
        yield case("adamax", adamax, partial(optim.Adamax, **names))
    for adadelta in ADADELTAS:
        names = {"lr": adadelta["learning_rate"], "rho": adadelta["rho"]}
        yield case("adadelta", adadelta, partial(optim.Adadelta, eps=adadelta["epsilon"], **names))
    for momentum, centered in RMSPROPS:
        settings = {
            "learning_rate": 0.005,
            "rho": 0.99,
            "epsilon": 1e-8,
            "momentum": momentum,
            "centered": centered,
            "epsilon_inside_sqrt": False,
        }
        make = partial(
            optim.RMSprop, lr=0.005, alpha=0.99, eps=1e-8, momentum=momentum, centered=centered
        )
        yield case("rmsprop", settings, make)


def train_ftrl(
    alpha: float, lambda1: float, lambda2: float, power: float, accumulator: float
) -> Trainer:
    """Train with FTRL-Proximal in float64, in the paper's symbols."""

    def train(weights: Array, gradients: Array, scales: list[float]) -> list[Array]:
        w = weights.astype(np.float64)
        z = np.zeros_like(w)
        n = np.full_like(w, accumulator)
        after = []
        for gradient, scale in zip(gradients.astype(np.float64), scales, strict=True):
            rate = alpha * scale
            sigma = ((n + gradient**2) ** power - n**power) / rate
            z += gradient - sigma * w
            n += gradient**2
            w = -(z - np.sign(z) * lambda1) / (n**power / rate + lambda2)
            w[np.abs(z) <= lambda1] = 0.0
            after.append(w.astype(np.float32))
        return after

    return train


def ftrl_cases() -> Iterator[tuple[str, Case, Trainer, list[float]]]:
    """Yield (source, optimizer's JSON, trainer, learning rate scales) of each FTRL case."""
    for rate, l1, l2, power, accumulator in (
        (0.05, 0.0, 0.0, 0.5, 0.1),
        (0.05, 0.5, 0.1, 0.5, 0.1),
        (0.1, 0.01, 1.0, 0.5, 1.0),
        (0.05, 0.5, 0.1, 0.6, 0.1),
    ):
        settings = {
            "learning_rate": rate,
            "l1": l1,
            "l2": l2,
            "learning_rate_power": -power,
            "initial_accumulator": accumulator,
        }
        trainer = train_ftrl(rate, l1, l2, power, accumulator)
        yield "ftrl (McMahan et al. 2013, float64)", {"ftrl": settings}, trainer, CONSTANT


def train_adagrad(
    base_rate: float,
    epsilon: float,
    accumulator: float,
    squares: Callable[[Any], Any],
    decay: float,
) -> Trainer:
    """Train with a kind of Adagrad in float64, which accumulates ``squares`` of a gradient."""

    def train(weights: Array, gradients: Array, scales: list[float]) -> list[Array]:
        w = weights.astype(np.float64)
        a = np.full_like(w, accumulator)
        after = []
        for g, scale in zip(gradients.astype(np.float64), scales, strict=True):
            a = np.maximum(decay * a, accumulator) + squares(g)
            w -= base_rate * scale * g / (np.sqrt(a) + epsilon)
            after.append(w.astype(np.float32))
        return after

    return train


def rowwise_cases() -> Iterator[tuple[str, Case, Trainer, list[float]]]:
    """Yield (source, optimizer's JSON, trainer, learning rate scales): FBGEMM's formula."""
    for rate, epsilon, accumulator in ((0.05, 1e-8, 0.0), (0.02, 1e-3, 0.1)):
        settings = {
            "learning_rate": rate,
            "epsilon": epsilon,
            "initial_accumulator": accumulator,
        }
        trainer = train_adagrad(rate, epsilon, accumulator, mean_of_row, 1.0)
        source = "rowwise (FBGEMM's exact row-wise Adagrad, float64)"
        yield source, {"rowwiseadagrad": settings}, trainer, DECAYING


def mean_of_row(gradient: Any) -> Any:
    """Return the mean square of each row [rows, dim], once for each of its weights."""
    return np.broadcast_to(np.mean(gradient**2, axis=1, keepdims=True), gradient.shape)


def decay_cases() -> Iterator[tuple[str, Case, Trainer, list[float]]]:
    """Yield (source, optimizer's JSON, trainer, learning rate scales): DeepRec's, each step."""
    for rate, decay, accumulator in ((0.05, 0.9, 0.1), (0.02, 0.999, 1e-3), (0.1, 0.5, 0.0)):
        settings = {
            "learning_rate": rate,
            "decay": decay,
            "epsilon": 1e-10,
            "initial_accumulator": accumulator,
        }
        trainer = train_adagrad(rate, 1e-10, accumulator, np.square, decay)
        source = "decay (DeepRec's AdagradDecay at each step, float64)"
        yield source, {"adagraddecay": settings}, trainer, DECAYING


def train_group_ftrl(
    alpha: float, lambda1: float, lambda2: float, lambda21: float, accumulator: float
) -> Trainer:
    """Train with FTRL-Proximal with a sparse group lasso in float64, in the papers' symbols."""

    def train(weights: Array, gradients: Array, scales: list[float]) -> list[Array]:
        w = weights.astype(np.float64)
        z = np.zeros_like(w)
        n = np.full_like(w, accumulator)
        after = []
        for g, scale in zip(gradients.astype(np.float64), scales, strict=True):
            rate = alpha * scale
            z += g - (np.sqrt(n + g**2) - np.sqrt(n)) / rate * w
            n += g**2
            s = np.sign(z) * np.maximum(np.abs(z) - lambda1, 0.0)
            norms = np.maximum(np.linalg.norm(s, axis=1, keepdims=True), 1e-300)
            kept = np.maximum(1.0 - lambda21 * math.sqrt(w.shape[1]) / norms, 0.0)
            w = -kept * s / (np.sqrt(n) / rate + lambda2)
            after.append(w.astype(np.float32))
        return after

    return train


def group_ftrl_cases() -> Iterator[tuple[str, Case, Trainer, list[float]]]:
    """Yield (source, optimizer's JSON, trainer, learning rate scales) of each group FTRL case."""
    for rate, l1, l2, l21, accumulator in (
        (0.05, 0.0, 0.0, 0.0, 0.1),
        (0.05, 0.0, 0.1, 0.5, 0.1),
        (0.1, 0.3, 0.0, 0.2, 1.0),
    ):
        settings = {
            "learning_rate": rate,
            "l1": l1,
            "l2": l2,
            "l21": l21,
            "initial_accumulator": accumulator,
        }
        trainer = train_group_ftrl(rate, l1, l2, l21, accumulator)
        source = "groupftrl (Yang et al. 2010, Ni et al. 2019, float64)"
        yield source, {"groupftrl": settings}, trainer, CONSTANT


SOURCES = {
    "paddle": paddle_cases,
    "torch": torch_cases,
    "ftrl": ftrl_cases,
    "rowwise": rowwise_cases,
    "decay": decay_cases,
    "groupftrl": group_ftrl_cases,
}


def plain(array: Array) -> Any:
    """Return nested lists of the shortest decimals that give back the same float32."""
    shortest = [float(str(value)) for value in array.reshape(-1)]
    return np.array(shortest, dtype=np.float64).reshape(array.shape).tolist()


def run(source: str) -> list[Case]:
    """Return the finished cases of one source."""
    weights, gradients = inputs()
    cases = []
    for label, optimizer, trainer, scales in SOURCES[source]():
        after = trainer(weights, gradients, scales)
        expected = {str(step): plain(after[step - 1]) for step in RECORDED_STEPS}
        cases.append(
            {
                "source": label,
                "optimizer": optimizer,
                "learning_rate_scales": scales,
                "expected_after_step": expected,
            }
        )
    return cases


def main() -> None:
    """Replace the cases of the sources named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="+", choices=sorted(SOURCES))
    wanted = parser.parse_args().sources
    cases = json.loads(TARGET.read_text())["cases"] if TARGET.exists() else []
    cases = [case for case in cases if case["source"].split()[0] not in wanted]
    for source in wanted:
        cases += run(source)
    cases.sort(key=lambda case: (list(case["optimizer"]), case["source"]))
    weights, gradients = inputs()
    shared = {"weights": plain(weights), "gradients": plain(gradients)}
    lines = ",\n".join(json.dumps(case) for case in cases)
    head = json.dumps(shared)[:-1]
    TARGET.write_text(f'{head},\n"cases": [\n{lines}\n]}}\n')
    print(f"{TARGET.name}: {len(cases)} cases")


if __name__ == "__main__":
    main()
