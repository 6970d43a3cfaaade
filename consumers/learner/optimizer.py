"""Builds the optimizer and its schedule from settings: the learner's updates and its metrics ask the same functions."""

import optax

from consumers.learner.objective import OptimizerConfig


def make_schedule(config: OptimizerConfig, updates: int) -> optax.Schedule:
    """Cosine from the first learning rate to the final one over `updates` updates."""
    return optax.cosine_decay_schedule(
        config.learning_rate, max(updates, 1), alpha=config.final_learning_rate / config.learning_rate
    )


def make_optimizer(config: OptimizerConfig, updates: int) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) behind global-norm clipping."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            make_schedule(config, updates),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
        ),
    )
