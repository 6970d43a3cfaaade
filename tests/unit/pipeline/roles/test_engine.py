"""The command line and the variables of the vLLM that a run starts."""

import asyncio
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.engines import EngineHttp
from rollstream.pipeline.config import load
from rollstream.pipeline.roles.engine import (
    check_engine_python,
    check_nobody_answers,
    command_of,
    environment_of,
    label_weights,
)
from rollstream.topics.errors import ConfigurationError
from tests.support.producing import serving_http
from tests.support.serving_engines import VllmStandIn

FLAGS = ['serving.urls=["http://127.0.0.1:8123"]', f"serving.python={sys.executable}"]


def test_vllm_serves_where_workers_ask_under_the_name_they_ask_for_and_takes_weights() -> None:
    config = load(flags=[*FLAGS, "worker.model=policy", "inference.max_model_len=99", 'serving.flags=["--seed", "1"]'])
    command = command_of(config, Path("model"))
    assert command[:5] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "model"]
    text = " ".join(command)
    assert "--host 127.0.0.1 --port 8123" in text
    assert "--served-model-name policy --max-model-len 99 --generation-config vllm" in text
    assert "--logprobs-mode processed_logprobs --seed 1" in text
    assert "--weight-transfer-config" not in text
    plugin = " ".join(command_of(load(flags=[*FLAGS, "serving.engine=vllm-plugin"]), Path("model")))
    assert '--weight-transfer-config {"backend": "rollstream"} --worker-extension-cls rollstream.' in plugin


def test_variables_of_the_users_own_hold_and_programs_of_the_engines_environment_come_first() -> None:
    serving = load(flags=FLAGS).serving
    variables = environment_of(serving, {"PATH": "/usr/bin", "VLLM_CPU_KVCACHE_SPACE": "8"})
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert variables["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/usr/bin"


def test_a_python_without_vllm_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("has no vLLM; install it there")):
        check_engine_python(load(flags=FLAGS).serving)
    with pytest.raises(ConfigurationError, match="which is not a program on this machine"):
        check_engine_python(load(flags=["serving.python=vllm/bin/none"]).serving)


def test_an_address_where_another_server_answers_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=re.escape(f"already answers at {url}: end it")):
            check_nobody_answers(url)
    check_nobody_answers(url)


@pytest.mark.parametrize(
    ("label", "paused", "expected"),
    [("default", False, "20"), ("22", False, "22"), ("22", True, "22"), ("default", True, "default")],
)
def test_an_engine_is_labelled_once_and_not_amid_the_update_that_gives_it_another_label(
    label: str, paused: bool, expected: str
) -> None:
    engine = VllmStandIn()
    engine.reported, engine.paused = label, paused

    async def main() -> None:
        async with EngineHttp(url, ServingConfig()) as http:
            await label_weights(http, 20)

    with serving_http(engine.answer) as url:
        asyncio.run(main())
    assert engine.reported == expected
