"""Access to a decoder's whole parameters when each device has only a share of them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

Params = Mapping[str, jax.Array]
Whole = Callable[[Params], Params]
"""Function that takes shares of parameters, and returns the whole parameters under the same names."""

GATHERED = "gathered"
"""Name of gathered parameters in checkpoint policies (jax.ad_checkpoint)."""


def as_given(params: Params) -> Params:
    """Return the parameters as they are, because they are whole."""
    return params


def keep_all_but_gathered(primitive: Any, *_avals: Any, **settings: Any) -> bool:
    """Checkpoint policy that keeps activations, and gathers parameters again in the backward pass.

    Transposed parameters are not kept either, because they are as large as the parameters.
    """
    return primitive.name != "transpose" and settings.get("name") != GATHERED
