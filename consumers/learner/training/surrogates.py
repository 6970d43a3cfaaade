"""Surrogates: the loss of each token, by the name of the loss; pure functions with the formulas of their papers.

Masks, weights and sums are applied elsewhere: untrained tokens are zeros here, and their losses are ignored.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rollstream.consumers.learner.objective import LossRecipe, TokenArrays, TokenLoss
from rollstream.consumers.learner.user_objectives import user_loss
from rollstream.topics.errors import ConfigurationError

Surrogate = Callable[[TokenArrays, LossRecipe], TokenLoss]
UserLoss = Callable[[TokenArrays, LossRecipe], TokenLoss | jax.Array]
"""A user's loss may return only the loss of each token, [rows, tokens]."""


def clipped(tokens: TokenArrays, recipe: LossRecipe) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and at most -ratio_cap A where A < 0.

    PPO (arXiv:1707.06347) with a separate upper bound (DAPO, arXiv:2503.14476) and a dual clip (arXiv:1912.09729).
    GRPO, Dr. GRPO and DAPO use it too; they differ in advantages, reduction and bounds.
    """
    ratio, advantages = jnp.exp(tokens.log_ratio), tokens.advantages
    within = jnp.clip(ratio, 1.0 - recipe.clip_low, 1.0 + recipe.clip_high)
    objective = jnp.minimum(ratio * advantages, within * advantages)
    if math.isfinite(recipe.ratio_cap):
        objective = jnp.where(advantages < 0, jnp.maximum(objective, recipe.ratio_cap * advantages), objective)
    return TokenLoss(
        loss=-objective,
        low=(advantages < 0) & (ratio < 1.0 - recipe.clip_low),
        high=(advantages > 0) & (ratio > 1.0 + recipe.clip_high),
        cap=(advantages < 0) & (ratio > recipe.ratio_cap),
    )


def reinforce(tokens: TokenArrays, recipe: LossRecipe) -> TokenLoss:
    """-A log p: REINFORCE on whole completions, as in RLOO (arXiv:2402.14740)."""
    nowhere = jnp.zeros_like(tokens.mask, bool)
    return TokenLoss(-tokens.advantages * tokens.log_probs, nowhere, nowhere, nowhere)


def sequence_clipped(tokens: TokenArrays, recipe: LossRecipe) -> TokenLoss:
    """`clipped`, with each ratio replaced by the geometric mean s over its sequence (GSPO, arXiv:2507.18071).

    This is GSPO-token in the paper: the ratio of token t is stop(s) p_t / stop(p_t). It has the gradient of GSPO if the
    advantages of a sequence are equal, and is also defined if they are not.
    """
    stop = jax.lax.stop_gradient
    log_mean = sequence_means(tokens.log_ratio, tokens.mask, tokens.segment_ids)
    return clipped(tokens._replace(log_ratio=stop(log_mean) + tokens.log_probs - stop(tokens.log_probs)), recipe)


def clipped_weight(tokens: TokenArrays, recipe: LossRecipe) -> TokenLoss:
    """-stop(clip(r, 1 - clip_low, 1 + clip_high)) A log p: every token keeps a gradient (CISPO, arXiv:2506.13585)."""
    ratio = jnp.exp(jax.lax.stop_gradient(tokens.log_ratio))
    low, high = 1.0 - recipe.clip_low, 1.0 + recipe.clip_high
    return TokenLoss(
        loss=-jnp.clip(ratio, low, high) * tokens.advantages * tokens.log_probs,
        low=ratio < low,
        high=ratio > high,
        cap=jnp.zeros_like(tokens.mask, bool),
    )


def softly_gated(tokens: TokenArrays, recipe: LossRecipe) -> TokenLoss:
    """-(4 / t) sigmoid(t (r - 1)) A, with t = gate_positive where A > 0 and gate_negative elsewhere.

    SAPO (arXiv:2511.20347, equations 5 and 6): at ratio 1, the gradient of a token is the policy gradient. It fades as
    the ratio moves away from 1, and no bound cuts it off.
    """
    temperature = jnp.where(tokens.advantages > 0, recipe.gate_positive, recipe.gate_negative)
    gate = 4.0 / temperature * jax.nn.sigmoid(temperature * (jnp.exp(tokens.log_ratio) - 1.0))
    nowhere = jnp.zeros_like(tokens.mask, bool)
    return TokenLoss(-gate * tokens.advantages, nowhere, nowhere, nowhere)


def cross_entropy(tokens: TokenArrays, recipe: LossRecipe) -> TokenLoss:
    """-log p of every trained token, whatever its advantage: supervised training."""
    nowhere = jnp.zeros_like(tokens.mask, bool)
    return TokenLoss(-tokens.log_probs, nowhere, nowhere, nowhere)


def paired(tokens: TokenArrays, recipe: LossRecipe) -> TokenLoss:
    """-log sigmoid(beta h) at each token of a pair, h = the log ratio of the chosen sequence less that of the rejected.

    DPO (arXiv:2305.18290). Sequences 1 and 2 of a row are a pair, 3 and 4 the next; advantages above 0 are chosen.
    """
    signed = jnp.sign(tokens.advantages) * tokens.log_ratio
    margin = sequence_sums(signed, (tokens.segment_ids + 1) // 2)
    nowhere = jnp.zeros_like(tokens.mask, bool)
    return TokenLoss(-jax.nn.log_sigmoid(recipe.beta * margin), nowhere, nowhere, nowhere)


SURROGATES: dict[str, Surrogate] = {
    "ppo_clip": clipped,
    "grpo": clipped,
    "dr_grpo": clipped,
    "dapo": clipped,
    "rloo": reinforce,
    "gspo": sequence_clipped,
    "cispo": clipped_weight,
    "sapo": softly_gated,
    "ce": cross_entropy,
    "dpo": paired,
}
"""Surrogates by the names of objective.RECIPES."""


def surrogate_of(name: str) -> Surrogate:
    """Return the surrogate of a loss by name; a user's loss is imported. Raises ConfigurationError for other names."""
    return SURROGATES[name] if name in SURROGATES else whole(user_loss(name))


def whole(loss: UserLoss) -> Surrogate:
    """Return a user's loss as a surrogate, which raises ConfigurationError unless there is one loss for each token."""

    def surrogate(tokens: TokenArrays, recipe: LossRecipe) -> TokenLoss:
        result = loss(tokens, recipe)
        if not isinstance(result, TokenLoss):
            nowhere = jnp.zeros_like(tokens.mask, bool)
            result = TokenLoss(jnp.asarray(result), nowhere, nowhere, nowhere)
        if result.loss.shape != tokens.mask.shape:
            raise ConfigurationError(
                f"the loss returned an array of shape {result.loss.shape} for tokens of shape {tokens.mask.shape}; "
                "return one number for each token; learner.loss.reduction sums them"
            )
        return result

    return surrogate


def sequence_sums(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Sum of `values` [rows, tokens] over each token's sequence; `segment_ids` are at most 1 + the number of tokens."""

    def of_row(values: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.zeros(len(ids) + 2, values.dtype).at[ids].add(values)[ids]

    return jax.vmap(of_row)(values, segment_ids)


def sequence_means(values: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Mean of `values` over the trained tokens of each token's sequence; 0 if none is trained."""
    return sequence_sums(values * mask, segment_ids) / jnp.maximum(sequence_sums(mask, segment_ids), 1.0)
