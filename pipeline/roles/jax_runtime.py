"""Sets a process up for JAX before anything imports it: threads, a compile cache that stays, an error without it."""

import importlib.util
import os

from pipeline import interruption
from pipeline.config import RunConfig
from topics.errors import ConfigurationError

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def require_jax() -> None:
    """Raise ConfigurationError where the extra `learner` is not installed."""
    missing = [name for name in ("jax", "optax", "orbax") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the learner and the inference server need {', '.join(missing)}: pip install 'rollstream[learner]'"
        )


def prepare_jax(config: RunConfig) -> None:
    """Check that JAX is there, keep what it compiles under data_dir, and set the number of its CPU threads."""
    from consumers.learner.environment import prepare_environment

    require_jax()
    interruption.never_raise()
    cache = config.data_dir.resolve() / "cache" / "jax"
    cache.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(CACHE_VARIABLE, str(cache))
    prepare_environment(config.learner)
