"""`rollstream role infer` over a small model with random weights, asked by the official openai client.

Such a model emits noise: bytes that are no text, tokens that no tokenizer would choose, ends at any place. Its tokens
must come through all the same.
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from rollstream.consumers.models import huggingface
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.tokenizer_file import TokenizerFile, load_tokenizer
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.step_log import StepLog
from rollstream.producers.inference.answers import samples_of
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import provisioning
from tests.support.checkpoints import random_parameters
from tests.support.recipe import write_model
from tests.support.runs import RealRun
from tests.support.waiting import eventually
from tests.unit.producers.inference.chat.test_templates import QWEN

pytestmark = pytest.mark.long  # a server that compiles for a minute; the short form has that of the museum

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}]


@pytest.fixture(scope="module")
def run(broker: str, compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    """A run with one policy version, published the way a learner publishes it."""
    run = RealRun(KafkaConfig(bootstrap_servers=broker), "infer-chat", tmp_path_factory.mktemp("run"))
    provisioning.apply(run.kafka, run.topics, run.name)
    model = write_model(run.directory / "model", **SMALL)
    config = {"chat_template": QWEN, "eos_token": "<|im_end|>"}
    (run.directory / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    publish(run, model, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
        yield run
    run.stop()


def publish(run: RealRun, model: DecoderConfig, step: int) -> None:
    """Publish the weights of a step, which differ from those of all other steps."""
    log = StepLog(run.kafka, run.name, "default")
    publisher = WeightsPublisher(run.kafka, run.name, "default", json.dumps(asdict(model)), WeightsConfig())
    parameters = {name: array * 0.8**step for name, array in random_parameters(model).items()}
    manifest = publisher.stage(step, parameters)
    log.commit([publisher.record(manifest)])
    publisher.committed(manifest)
    log.close()


@pytest.fixture(scope="module")
def tokenizer(run: RealRun) -> TokenizerFile:
    return load_tokenizer(run.directory / "model")


def started(run: RealRun, **settings: object) -> tuple[Any, str]:
    """A server's process, and its URL once it is ready."""
    process = run.start("infer", learner__pretrained=run.directory / "model", inference__max_model_len=512, **settings)

    def url() -> str:
        assert process.poll() is None, run.log_of(process)
        listening = re.search(r'"inference_listening".*?"url": "(.*?)"', run.log_of(process))
        return listening[1] if listening else ""

    return process, eventually(url, 240, "the server listens")


@pytest.fixture(scope="module")
def client(run: RealRun) -> Iterator[openai.OpenAI]:
    _, url = started(run)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as asks:
        yield asks


def test_three_turns_with_a_tool_are_one_sequence_of_the_engines_own_tokens(
    client: openai.OpenAI, tokenizer: TokenizerFile
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Which number is 7?"}]
    request: dict[str, Any] = {
        "model": "policy", "tools": TOOLS, "logprobs": True, "max_tokens": 24, "seed": 5, "messages": messages
    }  # fmt: skip
    sequence: list[int] = []
    for turn in range(3):
        answer = client.chat.completions.create(**request)
        [choice] = answer.choices
        assert answer.prompt_token_ids[: len(sequence)] == sequence
        # The tokens that were rendered are those of the new messages only.
        new = tokenizer.decode(answer.prompt_token_ids[len(sequence) :])
        assert new.count("<|im_start|>") == (3 if turn == 0 else 2), new
        # The endpoint that takes and returns tokens gives the same bits.
        generated = client.completions.create(
            model="policy", prompt=answer.prompt_token_ids, logprobs=1, max_tokens=24, seed=5
        )
        [own] = samples_of(generated.to_dict(warnings=False), "completions", source="infer")
        [captured] = samples_of(answer.to_dict(warnings=False), "chat", source="infer")
        assert captured.tokens.tolist() == own.tokens.tolist() == choice.token_ids
        assert captured.logprobs.tobytes() == own.logprobs.tobytes()
        assert captured.prompt_tokens.tolist() == answer.prompt_token_ids
        assert [(span.label, span.start, span.stop) for span in captured.spans] == [("0", 0, len(choice.token_ids))]
        parts = list(client.chat.completions.create(**request, stream=True))
        assert [token for part in parts for token in part.choices[0].token_ids] == choice.token_ids
        assert "".join(part.choices[0].delta.content or "" for part in parts) == (choice.message.content or "")
        sequence = [*answer.prompt_token_ids, *choice.token_ids]
        messages.append(choice.message)
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": f"{turn}"})
    # The text that came back could not have been tokenised to what was sampled.
    assert tokenizer.encode(tokenizer.decode(sequence)) != sequence


def test_the_models_card_has_what_clients_ask_it_for(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.to_dict().items() >= {"id": "policy", "max_model_len": 512, "policy_version": 0}.items()
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="policy", prompt=[5] * 512)
    assert refused.value.code == "context_length_exceeded"


def test_sigterm_lets_it_answer_what_it_has_begun(run: RealRun) -> None:
    process, url = started(run, inference__drain_timeout_s=60)
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client,
        ThreadPoolExecutor(12) as pool,
    ):
        # These are more requests than there is room for, so some wait when the signal comes.
        asks = [
            pool.submit(client.completions.create, model="policy", prompt=[5, 6], max_tokens=500, n=2, seed=seed)
            for seed in range(12)
        ]
        eventually(lambda: any(ask.done() for ask in asks), 60, "the first answer")
        process.send_signal(signal.SIGTERM)
        answers = [ask.result(300) for ask in asks]
    assert process.wait(300) == 0, run.log_of(process)
    assert all(len(answer.choices) == 2 for answer in answers)


def test_a_server_that_splits_the_model_over_devices_answers_as_one_device_does_before_and_after_a_swap(
    run: RealRun, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A sum over devices occupies one thread per device; by default there are only as many as processors.
    monkeypatch.setenv("NPROC", "16")
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4")
    _, url = started(
        run,
        inference__devices=4,
        inference__tensor_parallel=2,
        inference__max_rows=16,
        inference__replica_id="split",
    )

    def answers(server: openai.OpenAI) -> list[Any]:
        answer = server.completions.create(model="policy", prompt=[5, 6, 7], max_tokens=40, n=8, seed=3, logprobs=1)
        return answer.choices

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as split:

        def has(server: openai.OpenAI, version: int) -> bool:
            return bool(server.models.list().data[0].to_dict()["policy_version"] == version)

        for number in range(2):
            if number:
                publish(run, huggingface.load_config(run.directory / "model"), number)
            for each in (split, client):
                eventually(partial(has, each, number), 120, f"policy version {number}")
            ours, theirs = answers(split), answers(client)
            assert [choice.token_ids for choice in ours] == [choice.token_ids for choice in theirs]
            assert {span["version"] for choice in ours for span in choice.weight_versions} == {str(number)}
            for choice, other in zip(ours, theirs, strict=True):
                pairs = zip(choice.logprobs.token_logprobs, other.logprobs.token_logprobs, strict=True)
                assert max(abs(a - b) for a, b in pairs) < 1e-4
