"""Prepares a process for JAX before anything imports it: threads, a compile cache, and an error if JAX is missing."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process import interruption
from rollstream.topics.errors import ConfigurationError, RollstreamError

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
CACHED_FROM_VARIABLE = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def require_jax() -> None:
    """Raise ConfigurationError if the extra `learner` is not installed."""
    missing = [name for name in ("jax", "optax", "orbax") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the learner and the inference server need {', '.join(missing)}: pip install 'rollstream[learner]'"
        )


def prepare_jax(config: RunConfig) -> None:
    """Check that JAX is installed, and set its compile cache and the number of its CPU threads.

    Raises ConfigurationError if the directory of the cache cannot be made.
    """
    from rollstream.consumers.learner.reproducibility import prepare_environment

    require_jax()
    interruption.never_raise()
    cache = Path(config.learner.compile_cache or config.data_dir / "cache" / "jax").resolve()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"JAX's compile cache cannot be at {cache} ({error.strerror}); set learner.compile_cache to a directory "
            "that this process may write to"
        ) from error
    os.environ.setdefault(CACHE_VARIABLE, str(cache))
    # By default only compilations of a second or more are cached; a learner compiles dozens of smaller functions.
    os.environ.setdefault(CACHED_FROM_VARIABLE, "0")
    prepare_environment(config.learner)


@contextmanager
def ending_at_once(processes: int, debug: bool) -> Iterator[None]:
    """End this process at once after an error, if it is one of several that train together.

    A regular exit would hang: JAX waits for the other processes, which wait for this one or have ended.
    """
    try:
        yield
    except RollstreamError as error:
        if processes == 1 or debug:
            raise
        print(f"rollstream: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Send to stderr what native libraries, such as Gloo, print on stdout, which is reserved for a command's answer."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
