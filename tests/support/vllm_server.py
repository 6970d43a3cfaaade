"""A vLLM as a process of its own, as `serve-weights` expects one: in development mode, with our plug-in."""

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollstream.consumers.serving.engines import EXTENSION
from rollstream.consumers.serving.vllm_plugin.registration import BACKEND
from rollstream.infra.broker.ports import free_port
from tests.support.paths import ROOT
from tests.support.waiting import eventually

ENVIRONMENT = ROOT / ".venv" / "vllm"
READY_S = 600.0
"""Most of it are imports, on a machine that does other things."""
_LOWERED = 10


def is_installed() -> bool:
    """Whether the environment of vLLM is there; `make test-all` installs it."""
    return (ENVIRONMENT / "bin" / "vllm").exists()


@contextmanager
def vllm_server(checkpoint: Path, log: Path, *flags: str, **variables: str) -> Iterator[str]:
    """URL of a vLLM in development mode that serves a checkpoint as `policy`; ended on leaving.

    `variables` are set in its environment.
    """
    port = free_port("127.0.0.1")
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                *(ENVIRONMENT / "bin" / "vllm", "serve", checkpoint, "--served-model-name", "policy"),
                *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024", "--dtype", "float32"),
                *("--enforce-eager", "--weight-transfer-config", json.dumps({"backend": BACKEND})),
                *("--worker-extension-cls", EXTENSION, *flags),
            ],
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={
                **os.environ,
                "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                **variables,
            },
        )
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: process.poll() is not None or healthy(url), READY_S, f"vLLM to serve; see {log}")
        assert process.poll() is None, log.read_text()[-3000:]
        # It starts at the priority of others, because starting takes minutes of processor time.
        _yield_to_others(process.pid)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # Its engine may outlive it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _yield_to_others(session: int) -> None:
    """Lower the priority of a session of processes, named by its leader.

    A vLLM on a CPU keeps two cores busy while it samples. At the priority of others it delays a broker on the same
    two cores by seconds: it took 3 to 6 s to publish a small delta, and takes 0.1 s with the lower priority.
    """
    os.setpriority(os.PRIO_PGRP, session, _LOWERED)
    autogroup = Path(f"/proc/{session}/autogroup")
    if autogroup.exists():
        autogroup.write_text(str(_LOWERED))


def healthy(url: str) -> bool:
    """Whether a server answers that it is healthy."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
