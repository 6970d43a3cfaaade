"""The policy: a small network that values the moves, which runs on numpy in the workers and on JAX in the learner."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reach import MOVES, PIXELS, SIDE

HIDDEN = 64
FEATURES = 8
"""Number of features detected in the cells of an image."""
_SHARPNESS = 4.0
"""Initial weight of a cell that shows a feature, compared with a cell that does not."""
_CELLS = np.stack(np.meshgrid(*[np.linspace(-1, 1, SIDE, dtype=np.float32)] * 2, indexing="ij"), -1).reshape(-1, 2)
"""Positions of the cells, [64, 2]."""

Parameters = dict[str, Any]


def initial(rng: np.random.Generator, *, image: bool) -> dict[str, NDArray[np.float32]]:
    """Return the initial parameters of the network (He et al. 2015)."""
    sizes = {"hidden": (4, HIDDEN), "middle": (HIDDEN, HIDDEN), "values": (HIDDEN, len(MOVES))}
    if image:
        sizes |= {"features": (PIXELS * PIXELS * 3, FEATURES), "hidden": (FEATURES * 2, HIDDEN)}
    made = {}
    for name, (inputs, outputs) in sizes.items():
        scale = 0.01 if name == "values" else np.sqrt(2 / inputs)
        made[f"{name}.w"] = (rng.standard_normal((inputs, outputs)) * scale).astype(np.float32)
        made[f"{name}.b"] = np.zeros(outputs, np.float32)
    return made


def values(parameters: Parameters, seen: Mapping[str, Any], xp: ModuleType = np) -> Any:
    """Return the value of each move, [..., 5], for observations [..., *]. `xp` is numpy or jax.numpy."""

    def layer(name: str, inputs: Any) -> Any:
        return inputs @ parameters[f"{name}.w"] + parameters[f"{name}.b"]

    if "image" in seen:
        image = seen["image"]
        above = image.shape[:-3]
        # A convolution whose patches do not overlap multiplies every patch by the same matrix.
        patches = image.reshape(*above, SIDE, PIXELS, SIDE, PIXELS, 3).swapaxes(-4, -3) / np.float32(255)
        shown = layer("features", patches.reshape(*above, SIDE * SIDE, -1)) * _SHARPNESS
        # The spatial softmax gives the position of each feature (Finn et al. 2016).
        shown = xp.exp(shown - shown.max(-2, keepdims=True))
        places = (shown / shown.sum(-2, keepdims=True)).swapaxes(-1, -2) @ _CELLS
        inputs = places.reshape(*above, -1)
    else:
        inputs = 2 * seen["state"] - 1
    return layer("values", xp.maximum(layer("middle", xp.maximum(layer("hidden", inputs), 0)), 0))
