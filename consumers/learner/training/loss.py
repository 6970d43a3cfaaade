"""The losses of the learner as pure JAX functions over one packed microbatch.

The caller gives the denominators of sums, counted over the whole update, so that microbatches and processes add up to
the same gradient however an update is split.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from rollstream.consumers.learner.objective import (
    COMPARED,
    MISMATCH_METRICS,
    PAIR_ACCURACY,
    WEIGHT_MOMENTS,
    LossConfig,
    TokenArrays,
    denominator_of,
    in_pairs,
    needs_reference,
    needs_teacher,
    policy_metrics,
)
from rollstream.consumers.learner.training.corrections import (
    divergence,
    importance_weights,
    log_ratio,
    off_policy_mask,
    rejected,
    returns,
)
from rollstream.consumers.learner.training.packing import KEPT_POSITIONS, KEPT_TOKENS, LOSS_NUMBERS
from rollstream.consumers.learner.training.surrogates import Surrogate, surrogate_of
from rollstream.consumers.models.config import ComputeSettings, DecoderConfig
from rollstream.consumers.models.decoder import BLOCKS, Params, hidden, token_logprobs
from rollstream.consumers.models.sharding import Whole, as_given, sequence_parts
from rollstream.consumers.models.vocabulary import Kept
from rollstream.topics.errors import ConfigurationError

Arrays = Mapping[str, jax.Array]

SUPERVISED_METRICS = ("loss",)


def policy_loss(
    params: Params,
    model: DecoderConfig,
    compute: ComputeSettings,
    config: LossConfig,
    batch: Arrays,
    denominators: Arrays,
    whole: Whole = as_given,
    others: Sequence[LossConfig] = (),
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The configured policy-gradient loss, to be minimized, and its metrics.

    `batch` holds the arrays of a PackedBatch, [rows, sequence_length]; `denominators` are the numbers of trained
    "tokens" and of "sequences" with a trained token, over the whole update in all processes, float32 and at least 1.
    `params` may be shares, from which `whole` makes whole parameters in the compute dtype. See `policy_loss_of`. With
    `others`, the loss is the sum of every loss over its own tokens, which the batch numbers (0: `config`).
    """
    logprobs, entropy = _next_token_logprobs(params, model, compute, batch, whole)
    if others:
        return _mixed_loss_of(logprobs, entropy, (config, *others), batch, denominators)
    return policy_loss_of(logprobs, entropy, config, batch, denominators)


def _mixed_loss_of(
    logprobs: jax.Array, entropy: jax.Array, losses: Sequence[LossConfig], batch: Arrays, denominators: Arrays
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The sum of `policy_loss_of` for each of several losses with equal reductions, over the tokens with its number.

    Tokens of a loss without importance weights have weight 1, and those of a loss that does not compare the sampler are
    not compared: see `objective.reported`.
    """
    names = policy_metrics(*losses, reference="reference_log_probs" in batch, teacher="teacher_log_probs" in batch)
    sums = dict.fromkeys(names, jnp.zeros(()))
    for number, config in enumerate(losses):
        mask = batch["loss_mask"] * (batch[LOSS_NUMBERS] == number)
        _, own = policy_loss_of(logprobs, entropy, config, {**batch, "loss_mask": mask}, denominators)
        share = jnp.sum(mask[:, 1:]) / denominators["tokens"]
        weights = dict.fromkeys(("importance/weight_mean", *WEIGHT_MOMENTS), share)
        compared = {COMPARED: share} if config.compares_sampler else dict.fromkeys(MISMATCH_METRICS, jnp.zeros(()))
        sums = {name: value + {**weights, **own, **compared}.get(name, 0.0) for name, value in sums.items()}
    return sums["loss"], sums


def policy_loss_of(
    logprobs: jax.Array,
    entropy: jax.Array,
    config: LossConfig,
    batch: Arrays,
    denominators: Arrays,
    surrogate: Surrogate | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss given the learner's log-probabilities of tokens 1 onwards and entropies, [rows, sequence_length - 1].

    A token's loss is w L - entropy_coefficient H + kl_coefficient D. L is the surrogate (`surrogates`) of a ratio.
    Without importance sampling, this is the ratio of the learner to the generator, and w = 1. With it, this is the
    ratio of the learner to the proximal policy, and w is the limited ratio of the proximal policy to the generator
    (decoupled PPO, arXiv:2110.00641 and 2505.24298). The proximal policy is the learner before the step:
    `proximal_log_probs`, or the learner itself if a step has one update. H is the entropy, D the divergence from the
    reference. `surrogate` replaces the surrogate of the configured name. With kl_place "advantage" or "return", D is
    not a term of the loss but a constant part of the advantages. The teacher's log-probability minus that of the
    proximal policy is always such a part (on-policy distillation). Without importance sampling, the learner before the
    update takes the place of the proximal policy.

    Returns sum(loss_weights * token loss) / denominators[denominator_of(config)] and the metrics named by
    `policy_metrics(config, reference=...)`, means over trained tokens. All are already divided, so that their sums over
    microbatches and processes are the values of the update. Raises ConfigurationError if a reference is needed without
    `reference_log_probs`, or distillation_coefficient without `teacher_log_probs`.
    """
    if needs_reference(config) and "reference_log_probs" not in batch:
        raise ConfigurationError(
            "learner.loss needs a reference, but the rollouts carry no reference log-probabilities and no reference "
            "model is loaded; set learner.reference, or kl_coefficient to 0"
        )
    if needs_teacher(config) and "teacher_log_probs" not in batch:
        raise ConfigurationError(
            "learner.loss.distillation_coefficient is set, but there is no teacher; set learner.teacher, or "
            "distillation_coefficient to 0"
        )
    recipe = config.recipe
    mask, segment_ids = batch["loss_mask"][:, 1:], batch["segment_ids"][:, 1:]
    trained = mask > 0
    logprobs, entropy = jnp.where(trained, logprobs, 0.0), jnp.where(trained, entropy, 0.0)
    generator = batch["generator_log_probs"][:, 1:]
    decoupled = recipe.importance_sampling != "none"
    before = jax.lax.stop_gradient(logprobs)
    if decoupled and "proximal_log_probs" in batch:
        before = batch["proximal_log_probs"][:, 1:]
    against = before if decoupled else generator
    if in_pairs(config):
        against = batch["reference_log_probs"][:, 1:]
    tokens = TokenArrays(
        log_probs=logprobs,
        log_ratio=log_ratio(logprobs, against, mask),
        advantages=_advantages(config, batch, before, mask, segment_ids),
        mask=mask,
        segment_ids=segment_ids,
    )
    mismatch = log_ratio(before, generator, mask)

    def mean(values: jax.Array) -> jax.Array:
        return jnp.sum(values * mask) / denominators["tokens"]

    bounded = (surrogate or surrogate_of(config.name))(tokens, recipe)
    token_loss = bounded.loss
    metrics = {
        "entropy/mean": mean(entropy),
        "mismatch_kl/mean": mean(divergence("k3", mismatch)),
        "mismatch_log_ratio/mean": mean(mismatch),
        "clip_ratio/low_mean": mean(bounded.low),
        "clip_ratio/high_mean": mean(bounded.high),
        "clip_ratio/cap_mean": mean(bounded.cap),
    }
    if in_pairs(config):
        metrics[PAIR_ACCURACY] = mean(token_loss < math.log(2))
    if decoupled:
        weights, limited = importance_weights(config, mismatch, mask, segment_ids)
        token_loss = weights * token_loss
        metrics |= {"importance/weight_mean": mean(weights), "importance/limited_mean": mean(limited)}
    else:
        weights = jnp.exp(jax.lax.stop_gradient(mismatch))
    for level, beyond in rejected(config, mismatch, mask, segment_ids).items():
        token_loss, weights = jnp.where(beyond, 0.0, token_loss), jnp.where(beyond, 0.0, weights)
        metrics[f"rejection/{level}_mean"] = mean(beyond)
    if decoupled or config.rejections:
        metrics |= dict(zip(WEIGHT_MOMENTS, (mean(weights), mean(jnp.square(weights))), strict=True))
    if config.sequence_mask_limit:
        # Uses the learner of this update, as in the paper, not the learner before the step.
        moved = log_ratio(logprobs, generator, mask)
        masked = off_policy_mask(config, moved, tokens.advantages, mask, segment_ids)
        token_loss = jnp.where(masked, 0.0, token_loss)
        metrics["sequence_mask/masked_mean"] = mean(masked)
    if recipe.entropy_coefficient:
        token_loss -= recipe.entropy_coefficient * entropy
    if "reference_log_probs" in batch:
        distance = divergence(config.kl_estimator, log_ratio(batch["reference_log_probs"][:, 1:], logprobs, mask))
        if config.kl_coefficient and config.kl_place == "loss":
            token_loss += config.kl_coefficient * distance
        metrics["kl/mean"] = mean(distance)
    if "teacher_log_probs" in batch:
        metrics["distillation/kl_mean"] = mean(log_ratio(before, batch["teacher_log_probs"][:, 1:], mask))
    loss_weights = jnp.where(trained, batch["loss_weights"][:, 1:], 0.0)
    loss = jnp.sum(loss_weights * token_loss) / denominators[denominator_of(config)]
    return loss, {"loss": loss, **metrics}


def _advantages(
    config: LossConfig, batch: Arrays, before: jax.Array, mask: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """Advantages [rows, tokens - 1] with the terms of reference and teacher; no gradient; 0 at untrained tokens.

    `before` holds log-probabilities of the policy before the step, or, without importance sampling, before the update.
    REINFORCE++ (arXiv:2501.03262) subtracts the return of the divergence; on-policy distillation subtracts the reverse
    divergence from the teacher, token by token (thinkingmachines.ai/blog/on-policy-distillation).
    """
    advantages = jnp.where(mask > 0, batch["advantages"][:, 1:], 0.0)
    if config.reward_coefficient != 1.0:
        advantages *= config.reward_coefficient
    before = jax.lax.stop_gradient(before)
    if config.kl_coefficient and config.kl_place != "loss":
        distance = divergence(config.kl_estimator, log_ratio(batch["reference_log_probs"][:, 1:], before, mask))
        if config.kl_place == "return":
            distance = returns(distance, mask, segment_ids)
        advantages -= config.kl_coefficient * distance * mask
    if config.distillation_coefficient:
        gain = log_ratio(batch["teacher_log_probs"][:, 1:], before, mask)
        advantages += config.distillation_coefficient * gain
    return advantages


def supervised_loss(
    params: Params,
    model: DecoderConfig,
    compute: ComputeSettings,
    batch: Arrays,
    denominators: Arrays,
    whole: Whole = as_given,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean negative log-probability of the trained tokens; arguments and results as for `policy_loss`."""
    logprobs, _ = _next_token_logprobs(params, model, compute, batch, whole)
    loss = -jnp.sum(logprobs * batch["loss_mask"][:, 1:]) / denominators["tokens"]
    return loss, {"loss": loss}


def log_probs(
    params: Params, model: DecoderConfig, compute: ComputeSettings, batch: Arrays, whole: Whole = as_given
) -> jax.Array:
    """Log-probability of every token given the tokens before it in its segment, float32 [rows, sequence_length].

    The value at the first token of a segment has no meaning; it is 0 at the first token of a row.
    """
    logprobs, _ = _next_token_logprobs(params, model, compute, batch, whole)
    return jnp.pad(logprobs, ((0, 0), (1, 0)))


def _next_token_logprobs(
    params: Params, model: DecoderConfig, compute: ComputeSettings, batch: Arrays, whole: Whole
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy [rows, sequence_length - 1] of tokens 1 onwards given the tokens before."""
    if whole is as_given:
        dtype = jnp.dtype(compute.dtype)
        params = {name: value.astype(dtype) for name, value in params.items()}
    else:
        params = {**params, **whole({name: value for name, value in params.items() if not name.startswith(BLOCKS)})}
    packed = batch["tokens"], batch["positions"], batch["segment_ids"]
    states = hidden(
        params,
        model,
        *packed,
        remat=compute.remat,
        attention=compute.attention,
        scanned=compute.scanned,
        whole=whole,
        experts=batch.get("routed_experts"),
    )
    kept = None
    if KEPT_TOKENS in batch:
        # The distribution of a token is computed at the position before it; no first token of a row is limited.
        kept = Kept(batch[KEPT_POSITIONS] - 1, batch[KEPT_TOKENS])
    if sequence_parts(states.shape[1]) > 1:
        # Rolling keeps all parts of equal length; the target of the last token is arbitrary, and its result is dropped.
        targets, temperatures = (jnp.roll(batch[name], -1, axis=1) for name in ("tokens", "temperatures"))
        logprobs, entropy = token_logprobs(
            params, model, states, targets, temperatures, kept=kept, chunk=compute.vocabulary_chunk
        )
        return logprobs[:, :-1], entropy[:, :-1]
    return token_logprobs(
        params,
        model,
        states[:, :-1],
        batch["tokens"][:, 1:],
        batch["temperatures"][:, 1:],
        kept=kept,
        chunk=compute.vocabulary_chunk,
    )
