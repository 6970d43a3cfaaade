"""Environment that the bits of a training step depend on: set before JAX is imported, fingerprinted in checkpoints.

Imports JAX only within `fingerprint`.
"""

import os
import platform
import re
import sys
from dataclasses import asdict
from importlib import metadata

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.topics.errors import ConfigurationError

_CACHE_FROM_S = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_NO_YNN = "--xla_cpu_experimental_ynn_fusion_type="
"""Turns YNN's CPU kernels off: they can hang (jax-ml/jax#39257), and slow a step from 25 to 35 ms."""
_YNN_SINCE = (0, 10, 1)


def prepare_environment(config: LearnerConfig) -> None:
    """Prepare the process for JAX: XLA's CPU threads and kernels, and a compile cache that keeps small functions too.

    Raises ConfigurationError if JAX is already imported with another number of threads, which it cannot change.
    """
    threads = str(config.threads)
    if "jax" in sys.modules and os.environ.get("NPROC") != threads:
        raise ConfigurationError(
            f"JAX is already imported and learner.threads {threads} cannot take effect; set NPROC={threads} "
            "in the environment, or import JAX later"
        )
    os.environ["NPROC"] = threads
    os.environ.setdefault(_CACHE_FROM_S, "0.2")
    flags = os.environ.get("XLA_FLAGS", "")
    # An unknown flag would end the process.
    if _version("jaxlib") >= _YNN_SINCE and "ynn_fusion_type" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_NO_YNN}".strip()


def fingerprint(config: LearnerConfig) -> dict[str, str]:
    """Return the properties that two executions must share to give the same bits, by name."""
    import jax

    from rollstream.consumers.learner.training.user_objectives import code_of

    return {
        **{package: metadata.version(package) for package in ("jax", "jaxlib", "numpy", "optax")},
        "device": ", ".join(sorted({device.device_kind for device in jax.devices()})),
        "devices": str(jax.device_count()),
        "processes": str(config.processes),
        "mesh": repr(config.mesh),
        "machine": platform.machine(),
        "threads": os.environ.get("NPROC", ""),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "configuration": repr(_training_settings(config)),
        **({"code": repr(code)} if (code := code_of(config)) else {}),
    }


def _training_settings(config: LearnerConfig) -> dict[str, object]:
    """The settings that change what a step computes, by name."""
    settings = asdict(config)
    for name in (
        "name",
        "take_over",
        "input_run",
        "checkpoint",
        "weights",
        "threads",
        "publish_every_steps",
        "sinks",
        "processes",
        "coordinator",
        "mesh",
    ):
        del settings[name]
    return settings


def _version(package: str) -> tuple[int, ...]:
    """Release numbers of an installed package."""
    return tuple(int(part) for part in re.findall(r"\d+", metadata.version(package))[:3])
