"""The entry point of the plug-in, which vLLM calls in each of its processes (group `vllm.general_plugins`)."""

from contextlib import suppress

BACKEND = "rollstream"
"""Name of the engine in vLLM's --weight-transfer-config."""


def register() -> None:
    """Register the weight transfer engine; a vLLM without such engines is left as it is."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    with suppress(ValueError):  # It is registered already: vLLM may load plug-ins more than once in a process.
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rollstream.consumers.serving.vllm_plugin.transfer_engine", "LogTransferEngine"
        )
