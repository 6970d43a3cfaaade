"""Figures of a step: speed in tokens a second and MFU, and whether log-probabilities fit the sampling policy.

MFU counts matrix products of parameters, as PaLM does (arXiv:2204.02311, appendix B), but not the products within
attention, so it is a lower bound for long sequences. Recomputed activations do not count.

Log-probabilities of samplers with another precision or kernel differ a little. Wrongly declared values differ a lot,
but they train without an error.
"""

import math
from collections.abc import Mapping

import jax

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.objective import LossConfig
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.parameters import EMBEDDING, is_adapter, is_expert, shapes

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}
"""Dense bfloat16 operations per second, as the vendor states them, by JAX's name of the device."""


def flops_per_token(model: DecoderConfig) -> float:
    """Operations of a forward and a backward pass for one token.

    Each value of a matrix takes two operations in the forward pass, two for the gradient of the input, and two for its
    own gradient; the last two do not count for parameters that adapters replace in training. An expert counts
    only for the share of tokens that it computes.
    """
    total = 0.0
    for name, shape in shapes(model).items():
        if len(shape) < 2 or (name == EMBEDDING and not model.tie_word_embeddings):
            continue
        trained = not model.lora.rank or is_adapter(name)
        computed = model.num_experts_per_tok / model.num_experts if is_expert(name) else 1.0
        total += (6 if trained else 4) * computed * shape[0] * shape[1]
    return total


def throughput_metrics(config: LearnerConfig, tokens: float, seconds: float) -> dict[str, float]:
    """Metrics of a step of `tokens` tokens that ended `seconds` after the previous step.

    `perf/mfu` is left out for devices whose peak is not known, such as CPUs.
    """
    device = jax.devices()[0].device_kind
    per_second = tokens / max(seconds, 1e-9)
    per_device = per_second / jax.device_count()
    flops = per_device * config.epochs * flops_per_token(config.model)
    figures = {
        "perf/throughput": per_second,
        "perf/device_throughput": per_device,
        "perf/device_flops": flops,
    }
    if device in PEAK_FLOPS:
        figures["perf/mfu"] = flops / PEAK_FLOPS[device]
    return figures


def mismatch_warning(metrics: Mapping[str, float], config: LossConfig, *others: LossConfig) -> str | None:
    """Return a warning that names the likely cause, or None if sampler and learner agree within the limits.

    `metrics` are from one step: mismatch_kl/mean, mismatch_log_ratio/mean and off_policy/staleness. The first two
    are zero up to rounding for a policy compared with itself. For different policies the mean log ratio is minus their
    divergence, so negative, if the tokens were drawn with the recorded probabilities. `others` are the other losses of
    the step, which have the same limits.
    """
    divergence, log_ratio = metrics.get("mismatch_kl/mean", 0.0), metrics.get("mismatch_log_ratio/mean", 0.0)
    staleness = metrics.get("off_policy/staleness", 0.0)
    fresh = staleness == 0.0
    limit = config.mismatch_limit + staleness * config.stale_mismatch_limit
    compares = any(loss.compares_sampler for loss in (config, *others))
    if divergence <= limit or not compares:  # The comparison is False for NaN.
        return None
    if not math.isfinite(divergence):
        cause = "recorded log-probabilities or parameters of the learner that are not numbers"
    elif log_ratio > 0:
        cause = (
            "tokens that were likelier than recorded: log-probabilities from before temperature (raw) declared as "
            "processed, or sampling cut by top_p, top_k or min_p"
        )
    elif fresh:
        cause = (
            "log-probabilities from after temperature (processed) declared as raw, a temperature other than declared, "
            "weights or a model in the sampler other than the version it names, or the precision of the sampler"
        )
    else:
        cause = (
            "rollouts too old for how fast the policy moves (learner.max_policy_lag, learner.optimizer.learning_rate), "
            "or wrong recorded values: check whether this also occurs at staleness 0"
        )
    return (
        f"mismatch_kl/mean {divergence:.3g} at staleness {staleness:.3g} is above the limit {limit:.3g}: "
        f"learner.loss.mismatch_limit {config.mismatch_limit:g} plus stale_mismatch_limit "
        f"{config.stale_mismatch_limit:g} per step of staleness (mean log ratio {log_ratio:.3g}); likely cause: {cause}"
    )
