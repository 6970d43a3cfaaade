"""The role `engine`: runs vLLM in another Python environment, started with the newest policy version of the run.

vLLM is run by `serving.python`, and ends with the role. It serves at the first of `serving.urls`, and the role is ready
once it answers there.
"""

import argparse
import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.engines import EXTENSION, VLLM_LORA, EngineFailed, EngineHttp, VllmEngine
from rollstream.consumers.serving.engines import NAME as PLUGIN
from rollstream.consumers.serving.vllm_plugin.registration import BACKEND
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process.role_process import announce_progress, announce_ready, run_until_stopped
from rollstream.pipeline.roles.infer import wait_for_version
from rollstream.pipeline.run.broker_wait import wait_for_broker
from rollstream.pipeline.tools.export import export_newest
from rollstream.topics.errors import ConfigurationError, RollstreamError
from rollstream.topics.heartbeats import beat
from rollstream.topics.secrets import program_environment

_LOOK_S = 0.5
_PROGRESS_S = 10.0
_STOP_S = 15.0
_ANSWER_S = 2.0
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Variables for vLLM, unless the role's environment sets them: they enable the routes that replace weights, disable
statistics and downloads, and allow a gigabyte for keys and values on a CPU."""


class EngineEnded(RollstreamError):
    """The engine's process ended by itself."""

    exit_code = 1


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream role engine`."""
    set_handler(parser, run, example="rollstream role engine --config run.toml", role=True)


def run(config: RunConfig, _args: argparse.Namespace) -> int:
    """Serve until stopped."""
    check_engine_python(config.serving)
    if config.serving.engine == VLLM_LORA:
        raise ConfigurationError(
            'serving.engine is "vllm-lora": start vLLM yourself, with the base model and --enable-lora, and leave '
            "serving.python empty"
        )
    if not config.serving.urls:
        raise ConfigurationError("serving.urls is empty; set the engine's address, e.g. http://127.0.0.1:8000")
    wait_for_broker(config)
    with WeightsFollower(config.kafka, config.run, config=config.learner.weights) as follower:
        wait_for_version(follower, config.supervisor.ready_timeout_s)
    directory = config.run_dir / "engine"
    shutil.rmtree(directory, ignore_errors=True)
    version = export_newest(config, directory)
    check_nobody_answers(config.serving.urls[0])
    # The engine is in this role's process group, so that whatever ends the role also ends the engine and its children.
    process = subprocess.Popen(
        command_of(config, directory),
        env=environment_of(config.serving, program_environment((config.serving.api_key,))),
        stdout=sys.stderr,
    )
    try:
        run_until_stopped(lambda stop: _serve(config.serving, process, version, stop))
    finally:
        _end(process)
    return 0


def check_engine_python(serving: ServingConfig) -> None:
    """Raise ConfigurationError if the engine's Python is not an executable program, or has no vLLM."""
    if not serving.python or shutil.which(serving.python) is None:
        raise ConfigurationError(
            f"serving.python is {serving.python!r}, which is not a program on this machine; name the python of an "
            "environment in which vLLM is installed"
        )
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([serving.python, "-P", "-c", look], capture_output=True).returncode:
        raise ConfigurationError(f"serving.python, {serving.python}, has no vLLM; install it there: pip install vllm")


def check_nobody_answers(url: str) -> None:
    """Raise ConfigurationError if a server listens at the engine's address: its answers would pass for the engine's."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), _ANSWER_S).close()
    except OSError:
        return
    raise ConfigurationError(
        f"another server, perhaps a vLLM that an earlier run left, already answers at {url}: end it, or name another "
        "address in serving.urls"
    )


def command_of(config: RunConfig, directory: Path) -> list[str]:
    """Return the command line of the engine that serves a checkpoint."""
    serving, address = config.serving, urlsplit(config.serving.urls[0])
    flags = ["--host", str(address.hostname), "--port", str(address.port), "--enable-scale-out"]
    flags += ["--served-model-name", config.worker.model, "--max-model-len", str(config.inference.max_model_len)]
    # Otherwise calls without top_p, top_k or penalties are sampled with those of the checkpoint.
    flags += ["--generation-config", "vllm"]
    if config.worker.logprobs_mode == "processed":
        flags += ["--logprobs-mode", "processed_logprobs"]
    if serving.engine == PLUGIN:
        flags += ["--weight-transfer-config", f'{{"backend": "{BACKEND}"}}', "--worker-extension-cls", EXTENSION]
    return [serving.python, "-m", "vllm.entrypoints.cli.main", "serve", str(directory), *flags, *serving.flags]


def environment_of(serving: ServingConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of the engine; programs of its Python environment come first in PATH."""
    programs = str(Path(shutil.which(serving.python) or serving.python).absolute().parent)
    return {**ENVIRONMENT, **environment, "PATH": f"{programs}{os.pathsep}{environment.get('PATH', '')}"}


async def _serve(serving: ServingConfig, process: subprocess.Popen[bytes], version: int, stop: asyncio.Event) -> None:
    async with EngineHttp(serving.urls[0], serving) as http:
        if not await _until_healthy(http.url, process, stop):
            return
        try:
            await label_weights(http, version)
        except EngineFailed as error:
            raise EngineEnded(f"the engine serves, but rejects the version label of its weights: {error}") from error
        announce_ready()
        while not stop.is_set():
            beat("engine")
            _check(process)
            await _pause(stop)


async def label_weights(http: EngineHttp, version: int) -> None:
    """Label the weights that vLLM was started with, so that its answers name their version from the first one on.

    A label that `serve-weights` has given stays, and an engine that it has paused gets its label from it. Raises
    EngineFailed.
    """
    # vLLM answers one question after another, and none during a load. So `default` may be the label of weights that
    # were loaded before the answer; then the engine is still paused, because it resumes only with its new label.
    if (await VllmEngine(http).label()).isdecimal():
        return
    if (await http.get("/is_paused")).get("is_paused") is not True:
        await http.post("/update_weight_version", {"new_version": str(version)})


async def _until_healthy(url: str, process: subprocess.Popen[bytes], stop: asyncio.Event) -> bool:
    """Wait until the engine answers; return False if `stop` is set first. Raises EngineEnded if its process ends."""
    began = said_at = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=_PROGRESS_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while not stop.is_set():
            _check(process)
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return True
            except (aiohttp.ClientError, TimeoutError):
                pass
            if time.monotonic() - said_at > _PROGRESS_S:
                said_at = time.monotonic()
                announce_progress(f"vLLM has been starting for {said_at - began:.0f} s")
            await _pause(stop)
    return False


async def _pause(stop: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(stop.wait(), _LOOK_S)
    except TimeoutError:
        return


def _check(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        raise EngineEnded(f"vLLM ended with exit code {process.returncode}; see the end of its log")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
