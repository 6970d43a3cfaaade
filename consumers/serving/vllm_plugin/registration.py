"""The entry point of the plug-in, which vLLM calls in each of its processes (group `vllm.general_plugins`)."""

import sys
from contextlib import suppress

BACKEND = "rollstream"
"""Name of the engine in vLLM's --weight-transfer-config."""


def register() -> None:
    """Register the weight transfer engine, unless this vLLM lacks support for such engines."""
    _request_amx()
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    with suppress(ValueError):  # Already registered: vLLM may load plug-ins several times in a process.
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rollstream.consumers.serving.vllm_plugin.transfer_engine", "LogTransferEngine"
        )


def _request_amx() -> None:
    """Ask Linux for permission to use matrix tiles (AMX), as vLLM's attention does on a CPU for bfloat16.

    Linux ends a process that uses them without permission with SIGILL, and programs that a process starts need their
    own permission. vLLM 0.32 leaves the request to oneDNN, which makes it only for large multiplications.
    """
    # vLLM has imported torch. The function is private, and may disappear once torch or vLLM makes the request.
    cpu = getattr(sys.modules.get("torch"), "cpu", None)
    getattr(cpu, "_init_amx", bool)()
