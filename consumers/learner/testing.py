"""Checks your own loss without a model, a broker or a run: call `check_loss` in a test.

The function imports JAX; this module does not. The loss is computed in float64 as the learner computes it, on made-up
sequences with known log-probabilities.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.consumers.learner.training.surrogates import UserLoss


def check_loss(loss: "UserLoss | str", *, on_policy: bool = True, seed: int = 0, **settings: Any) -> None:
    """Check a loss, given as a function or by name, under loss settings; raise AssertionError if a check fails.

    - Its gradient agrees with central differences of its value, in which `jax.lax.stop_gradient` holds values constant.
    - Tokens that are not trained have no gradient, and the values at these tokens have no effect.
    - How an update is split into microbatches and rows changes neither value nor gradient.
    - With `on_policy`, its gradient at ratio 1 is the policy gradient: -A for each token's log-probability. Set
      `on_policy` to False for a loss that is not meant to have this gradient. Terms other than the surrogate are left
      out of this check.
    """
    from rollstream.consumers.learner.training.loss_checks import check_all

    check_all(loss, on_policy, seed, settings)
