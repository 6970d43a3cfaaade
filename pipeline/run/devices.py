"""Variables with which the processes of a run share the GPUs of a machine, or have GPUs of their own."""

from collections.abc import Mapping

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import ENGINE, INFER, LEARN, counts

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Names the GPUs that a process sees, for CUDA and for ROCm."""
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_MEMORY = (PREALLOCATE, "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")
"""Variables by which users say themselves how JAX takes the memory of a GPU."""

_ROLES = (LEARN, INFER, ENGINE)
"""Roles that use GPUs."""


def device_variables(config: RunConfig, role: str, number: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that process `number` of a role gets in addition to `environment`.

    By default the first process that uses JAX reserves three quarters of a GPU's memory, and leaves too little to the
    next one for the workspaces of its matrix products. So the learners and servers of a run with several of them, which
    `rollstream steer scale` may add to, take memory as they need it, unless `environment` says how they take it.
    """
    gpus = config.supervisor.learner_gpus if role == LEARN else config.supervisor.inference_gpus
    variables = {VISIBLE: gpus[number % len(gpus)]} if gpus and role in _ROLES else {}
    shared = sum(counts(config).get(name, 0) for name in _ROLES) > 1
    if role in (LEARN, INFER) and shared and not any(environment.get(name) for name in _MEMORY):
        variables[PREALLOCATE] = "false"
    return variables
