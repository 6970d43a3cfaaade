"""Variables with which the processes of a run share the GPUs of a machine, or have GPUs of their own."""

from collections.abc import Mapping

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import ENGINE, INFER, LEARN, counts

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Names the GPUs that a process sees, for CUDA and for ROCm."""
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_MEMORY = (PREALLOCATE, "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")
"""Variables by which users say themselves how JAX takes the memory of a GPU."""


def device_variables(config: RunConfig, role: str, number: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that process `number` of a role gets in addition to `environment`.

    By default the first process that uses JAX reserves three quarters of a GPU's memory, and leaves too little to the
    next one for the workspaces of its matrix products. So processes that may share a GPU take memory as they need it,
    unless `environment` says how they take it.
    """
    gpus = _gpus(config, role)
    variables = {VISIBLE: gpus[number % len(gpus)]} if gpus else {}
    if role in (LEARN, INFER) and _shares(config) and not any(environment.get(name) for name in _MEMORY):
        variables[PREALLOCATE] = "false"
    return variables


def _gpus(config: RunConfig, role: str) -> tuple[str, ...]:
    """The GPUs of each process of a role; none if its processes see all."""
    if role == LEARN:
        return config.supervisor.learner_gpus
    return config.supervisor.inference_gpus if role in (INFER, ENGINE) else ()


def _shares(config: RunConfig) -> bool:
    """Whether two processes of the run may use one GPU."""
    running = counts(config)
    taken: list[str] = []
    for role in (LEARN, INFER, ENGINE):
        gpus = _gpus(config, role)
        for number in range(running.get(role, 0)):
            taken += gpus[number % len(gpus)].split(",") if gpus else ["all"]
    return len(taken) > 1 and ("all" in taken or len(set(taken)) < len(taken))
