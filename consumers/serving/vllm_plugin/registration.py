"""The entry point of the plug-in, which vLLM calls in each of its processes (group `vllm.general_plugins`)."""

import sys
from contextlib import suppress

BACKEND = "rollstream"
"""Name of the engine in vLLM's --weight-transfer-config."""


def register() -> None:
    """Register the weight transfer engine; a vLLM without such engines is left as it is."""
    _request_amx()
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    with suppress(ValueError):  # It is registered already: vLLM may load plug-ins more than once in a process.
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rollstream.consumers.serving.vllm_plugin.transfer_engine", "LogTransferEngine"
        )


def _request_amx() -> None:
    """Ask Linux for the processor's matrix tiles (AMX), which vLLM's attention uses on a CPU for bfloat16.

    Linux ends a process that uses them unasked with SIGILL, and gives them to a process, not to what it starts. vLLM
    0.32 leaves the request to oneDNN, which makes it only for multiplications that it finds large enough.
    """
    # vLLM has imported torch. The function is private, and may be gone once torch or vLLM asks by itself.
    cpu = getattr(sys.modules.get("torch"), "cpu", None)
    getattr(cpu, "_init_amx", bool)()
