"""Double DQN (van Hasselt et al. 2016) with one-step and multi-step targets. Pure functions of JAX."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from policy import Parameters, values

DISCOUNT = 0.95
TARGET_RATE = 0.02
"""Share of the way that the slow network moves towards the fast one at each update."""
OPTIMIZER = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(2e-3))


def step_values(fast: Parameters, slow: Parameters, steps: dict[str, Any]) -> tuple[Any, Any]:
    """Return the fast network's values of the moves taken, and the values of the next observations, each [...].

    The fast network chooses the next move and the slow network values it; after a termination the value is 0.
    """
    taken = jnp.take_along_axis(values(fast, steps["curr_obs"], jnp), steps["actions"][..., None], -1)[..., 0]
    best = values(fast, steps["next_obs"], jnp).argmax(-1)
    after = jnp.take_along_axis(values(slow, steps["next_obs"], jnp), best[..., None], -1)[..., 0]
    return taken, jnp.where(steps["terminations"], 0.0, after)


def loss(fast: Parameters, slow: Parameters, windows: dict[str, Any], slices: dict[str, Any]) -> Any:
    """Return the mean Huber loss over single steps [N, ...], plus the mean over slices of steps [M, L, ...], whose
    targets reach to the end of the slice. `mask` marks the steps that a slice has."""
    taken, after = step_values(fast, slow, windows)
    single = optax.huber_loss(taken, jax.lax.stop_gradient(windows["rewards"] + DISCOUNT * after))

    taken, after = step_values(fast, slow, slices)
    there = slices["mask"]
    # Beyond the end of the slice, the network's estimate replaces the rewards.
    follows = jnp.concatenate([there[:, 1:], jnp.zeros_like(there[:, :1])], axis=1)
    target, targets = jnp.zeros(len(there)), []
    for t in reversed(range(there.shape[1])):
        target = slices["rewards"][:, t] + DISCOUNT * jnp.where(follows[:, t], target, after[:, t])
        targets.append(target)
    several = optax.huber_loss(taken, jax.lax.stop_gradient(jnp.stack(targets[::-1], axis=1)))
    return single.mean() + jnp.where(there, several, 0.0).sum() / there.sum()


@partial(jax.jit, donate_argnums=(0, 1, 2))
def update(fast: Parameters, slow: Parameters, state: Any, windows: dict[str, Any], slices: dict[str, Any]) -> Any:
    """Make one step of the optimizer; return both networks and the optimizer's state."""
    gradients = jax.grad(loss)(fast, slow, windows, slices)
    changes, state = OPTIMIZER.update(gradients, state, fast)
    fast = optax.apply_updates(fast, changes)
    return fast, optax.incremental_update(fast, slow, TARGET_RATE), state


def needed(steps: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of a sample that the loss reads."""
    names = ("curr_obs", "next_obs", "actions", "rewards", "terminations", "mask")
    return {name: steps[name] for name in names if name in steps}
