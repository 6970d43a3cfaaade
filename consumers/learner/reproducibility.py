"""Environment that the bits of a training step depend on: set before JAX is imported, fingerprinted in checkpoints.

Imports JAX only within `fingerprint`.
"""

import ast
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.topics.errors import ConfigurationError

_CACHE_FROM_S = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_NO_YNN = "--xla_cpu_experimental_ynn_fusion_type="
"""Turns YNN's CPU kernels off: they can hang (jax-ml/jax#39257), and slow a step from 25 to 35 ms."""
_YNN_SINCE = (0, 10, 1)
_GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin")
_DETERMINISTIC = {"--xla_gpu_deterministic_ops=": "true", "--xla_gpu_autotune_level=": "0"}
"""Flags for deterministic operations on GPUs, and for the same kernels at every start, not chosen by timings."""
GPU_TOLERANCE = 1e-3
"""Default of `learner.replay_tolerance` on GPUs: kernels outside of XLA may add in any order."""


def prepare_environment(config: LearnerConfig) -> None:
    """Prepare the process for JAX: XLA's CPU threads and kernels, and a compile cache that keeps small functions too.

    Raises ConfigurationError if JAX is already imported with another number of threads, which can no longer change.
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
    more = [_NO_YNN] if _version("jaxlib") >= _YNN_SINCE else []
    if _expects_gpu():
        more += [name + value for name, value in _DETERMINISTIC.items()]
    more = [flag for flag in more if flag.partition("=")[0] not in flags]
    if more:
        os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *more])


def fingerprint(config: LearnerConfig) -> dict[str, str]:
    """Return the properties that two executions must share to give the same bits, by name."""
    import jax

    from rollstream.consumers.learner.user_objectives import code_of

    # None stands for the device's own: TF32 on Nvidia's GPUs, bfloat16 on TPUs. A CPU has one precision.
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return {
        **{package: metadata.version(package) for package in ("jax", "jaxlib", "numpy", "optax")},
        "device": ", ".join(sorted({device.device_kind for device in jax.devices()})),
        "devices": str(jax.device_count()),
        "processes": str(config.processes),
        "mesh": repr(config.mesh),
        "machine": platform.machine(),
        "threads": os.environ.get("NPROC", ""),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **({"matmul_precision": str(precision)} if precision else {}),
        "configuration": repr(_training_settings(config)),
        **({"code": repr(code)} if (code := code_of(config)) else {}),
    }


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Differences of two fingerprints except users' code, with one entry for each setting; "" for a missing value."""
    before, after = _flat(then), _flat(now)
    return {
        name: (before.get(name, ""), after.get(name, ""))
        for name in sorted({*before, *after})
        if before.get(name, "") != after.get(name, "")
    }


def _flat(fingerprint: Mapping[str, str]) -> dict[str, str]:
    flat = {name: value for name, value in fingerprint.items() if name not in ("configuration", "code")}
    with_settings: list[tuple[str, Any]] = []
    if "configuration" in fingerprint:
        with_settings.append(("learner", ast.literal_eval(fingerprint["configuration"])))
    while with_settings:
        name, value = with_settings.pop()
        if isinstance(value, dict):
            with_settings += [(f"{name}.{key}", item) for key, item in value.items()]
        else:
            flat[name] = repr(value)
    return flat


def replay_tolerance(config: LearnerConfig) -> float:
    """The tolerance for steps executed again on the present devices; 0 if they must have the same bits."""
    import jax

    if config.replay_tolerance >= 0:
        return config.replay_tolerance
    return GPU_TOLERANCE if jax.default_backend() == "gpu" else 0.0


def _expects_gpu() -> bool:
    """Whether JAX has a plug-in for GPUs that it may use; does not import JAX."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    wanted = not platforms or any(name in platforms for name in ("gpu", "cuda", "rocm"))
    return wanted and any(importlib.util.find_spec(name) for name in _GPU_PLUGINS)


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
        "processes",
        "coordinator",
        "mesh",
        "replay_tolerance",
        "compile_cache",
    ):
        del settings[name]
    return settings


def _version(package: str) -> tuple[int, ...]:
    """The version of an installed package, as at most three numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", metadata.version(package))[:3])
