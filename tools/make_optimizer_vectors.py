"""Write tests/vectors/optimizers.json: what other implementations make of the same gradients.

The vectors are committed; this is run by hand when cases change. The two frameworks do not
live well in one environment, so each call replaces the cases of the sources it is given::

    python tools/make_optimizer_vectors.py paddle ftrl   # needs paddlepaddle and numpy
    python tools/make_optimizer_vectors.py torch         # needs torch and numpy

Paddle and PyTorch cases come from the frameworks' own optimizers on the CPU in float32; FTRL
from algorithm 1 of McMahan et al. (KDD 2013), written here in float64. Imports nothing of
backstay: the numbers must not depend on the code that they judge.
"""

from __future__ import annotations

import argparse
import json
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


def train_torch(make: Callable[..., Any], base_rate: float) -> Trainer:
    """Train with the torch optimizer that ``make([...])`` builds."""
    import torch

    def train(weights: Array, gradients: Array, scales: list[float]) -> list[Array]:
        parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
        optimizer = make([parameter])
        after = []
        for gradient, scale in zip(gradients, scales, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base_rate * scale
            parameter.grad = torch.from_numpy(gradient.copy())
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


SOURCES = {"paddle": paddle_cases, "torch": torch_cases, "ftrl": ftrl_cases}


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
