"""A vLLM that serves a small random checkpoint, for the session; its environment is installed by `make test-all`."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from rollstream.consumers.files import safetensors_files
from rollstream.consumers.models.huggingface import CONFIG, SINGLE, load_config
from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.engines import EngineHttp, VllmEngine
from rollstream.topics.config import KafkaConfig
from tests.support.checkpoints import SPECIAL_TOKENS, random_parameters, write_tokenizer
from tests.support.runs import RealRun
from tests.support.vllm_server import is_installed, vllm_server

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_CALL = ('<tool_call>\n{"name": "add", "arguments": {"a": ', ("20", "21"), ', "b": 22}}\n</tool_call>')
"""Tokens with which the model answers in a chat: a call of the tool add, with one of two numbers."""
VOCABULARY = 320


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
    """A Qwen2 of 0.4 million parameters with a tokenizer of Qwen's kind and a ChatML template: random, except that
    it begins its turns in a chat with a call of a tool."""
    directory = tmp_path_factory.mktemp("checkpoint")
    begin, numbers, end = TOOL_CALL
    write_tokenizer(directory, ["1 + 1 = 2, sure? really?"], VOCABULARY - 4)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([begin, *numbers, end])
    assert tokenizer.get_vocab_size() <= VOCABULARY
    tokenizer.save(str(directory / "tokenizer.json"))
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
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": tokenizer.token_to_id(SPECIAL_TOKENS[-1]),
    }
    (directory / CONFIG).write_text(json.dumps(settings))
    parameters = random_parameters(load_config(directory))
    succession = ("\u010a", (begin,)), (begin, numbers), *((number, (end,)) for number in numbers)
    for before, after in (*succession, (end, SPECIAL_TOKENS[-1:])):
        follow(parameters, tokenizer.token_to_id(before), [tokenizer.token_to_id(token) for token in after])
    safetensors_files.write(directory / SINGLE, parameters)
    return directory


def follow(parameters: dict[str, NDArray[np.float32]], before: int, after: Sequence[int]) -> None:
    """Make it all but certain that one of the tokens `after`, equally likely, follows the token `before`."""
    embedding = parameters["model.embed_tokens.weight"][before]
    # Large, so that what attention adds to it changes its direction little.
    embedding *= 100
    direction = embedding * parameters["model.norm.weight"]
    for token in after:
        parameters["lm_head.weight"][token] += 1.5 * direction / np.linalg.norm(direction)


@pytest.fixture(scope="session")
def vllm(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """A vLLM in development mode, with the routes that replace weights and with our plug-in."""
    if not is_installed():
        pytest.fail("vLLM is not installed: run make .venv/vllm/.installed (6 GB)", pytrace=False)
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    flags = ("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with vllm_server(checkpoint, log, *flags) as url:
        yield Vllm(f"{url}/v1", "policy", checkpoint)


async def update(vllm: Vllm, directory: Path, label: str) -> None:
    async with EngineHttp(vllm.url, ServingConfig()) as http:
        engine = VllmEngine(http)
        await engine.pause()
        await engine.load(directory, label)
        await engine.resume()


@pytest.fixture
def served(vllm: Vllm) -> Iterator[Vllm]:
    """The vLLM of the session; it gets its first weights back for other tests."""
    yield vllm
    asyncio.run(update(vllm, vllm.directory, "default"))


@pytest.fixture
def run(broker: str, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    run = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path)
    yield run
    run.stop()
