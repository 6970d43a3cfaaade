"""A vLLM that serves a small random checkpoint, for the session; its environment is installed by `make test-all`."""

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollstream.consumers.files import safetensors_files
from rollstream.consumers.models.huggingface import CONFIG, SINGLE, load_config
from rollstream.infra.ports import free_port
from tests.support.checkpoints import SPECIAL_TOKENS, random_parameters, write_tokenizer
from tests.support.paths import ROOT
from tests.support.waiting import eventually

ENVIRONMENT = ROOT / ".venv" / "vllm"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 320
READY_S = 600.0
"""Most of it are imports, on a machine that does other things."""


@dataclass(frozen=True)
class Vllm:
    """A vLLM server and the checkpoint it serves."""

    url: str
    """Base URL, ending in /v1."""
    model: str
    directory: Path

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of 0.3 million parameters with a tokenizer of Qwen's kind and a ChatML template."""
    directory = tmp_path_factory.mktemp("checkpoint")
    write_tokenizer(directory, ["1 + 1 = 2, sure? really?"], VOCABULARY)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": SPECIAL_TOKENS[-1], "pad_token": SPECIAL_TOKENS[0], "chat_template": CHAT_TEMPLATE})
    )
    settings = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": VOCABULARY - 1,
    }
    (directory / CONFIG).write_text(json.dumps(settings))
    safetensors_files.write(directory / SINGLE, random_parameters(load_config(directory)))
    return directory


@pytest.fixture(scope="session")
def vllm(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """A vLLM in development mode, with the routes that replace weights."""
    if not (ENVIRONMENT / "bin" / "vllm").exists():
        pytest.fail("vLLM is not installed: run make .venv/vllm/.installed (6 GB)", pytrace=False)
    port = free_port("127.0.0.1")
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                *(ENVIRONMENT / "bin" / "vllm", "serve", checkpoint, "--served-model-name", "policy"),
                *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024", "--dtype", "float32"),
                *("--enforce-eager", "--enable-scale-out"),
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
            },
        )
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: process.poll() is not None or healthy(url), READY_S, f"vLLM to serve; see {log}")
        assert process.poll() is None, log.read_text()[-3000:]
        yield Vllm(f"{url}/v1", "policy", checkpoint)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
