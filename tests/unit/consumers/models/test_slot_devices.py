"""Slots on several devices: the rows are those of one device, whether each holds a copy of the model or a part."""

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.long  # Eight devices on two cores take their time.
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=500"
"""On a busy machine a thread may wait long for a processor."""
LOGPROB_TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}
"""Logprobs are about -2. Sums over parts round otherwise than sums over the whole: in bfloat16, with its 8 bits, the
first tokens after a prompt differ by about 0.02."""

SAMPLES = """
import json
import sys

import jax
import numpy as np

from rollstream.consumers.models import decoder
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.slot_steps import decode_slots, fill_slots
from rollstream.consumers.models.slots import Row, SlotDecoder

config = DecoderConfig(num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
versions = []
for seed in (3, 4):
    params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(seed), config)
    sharper = {**params, decoder.EMBEDDING: params[decoder.EMBEDDING] * 6}
    versions.append({name: np.asarray(array) for name, array in sharper.items()})
rows = [
    Row(prompt=[5 + i // 4] * (1 + i % 3), seed=i, max_tokens=1 + i % 7, temperature=i % 2) for i in range(40)
]
sampled = {}
for devices, tensor, dtype in json.loads(sys.argv[1]):
    slots = SlotDecoder(
        config, slots=16, max_model_len=16, devices=devices, tensor_parallel=tensor, steps=3, dtype=dtype
    )
    old, new = map(slots.place, versions)
    answers = slots.sample(old, rows)
    compiled = decode_slots._cache_size() + fill_slots._cache_size()
    started = slots.start(old, rows[:8])
    groups = devices // tensor
    held = [old["model.layers.0.self_attn.k_proj.weight"], old["model.layers.0.mlp.down_proj.weight"]]
    # Weights are swapped while rows are in slots.
    decoded = [slots.decode(old), slots.decode(new)]
    sampled[f"{devices}x{tensor}x{dtype}"] = {
        "tokens": [row.tokens for row in answers],
        "logprobs": [row.logprobs for row in answers],
        "groups": sorted(slot // (16 // groups) for slot in started),
        "held": [array.addressable_shards[0].data.size / array.size for array in held],
        "swapped": [{str(started.index(row.slot)): row.tokens for row in each} for each in decoded],
        "dtype": held[0].dtype.name,
        "compiled_later": decode_slots._cache_size() + fill_slots._cache_size() - compiled,
    }
json.dump(sampled, sys.stdout)
"""
LAYOUTS = [(1, 1), (8, 1), (8, 4)]


@pytest.fixture(scope="module")
def sampled() -> dict[str, Any]:
    """Answers of each layout, from a process of its own, because this one already has JAX with one device."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8 {PATIENT}"
    # A sum over devices occupies a thread of each device; by default there are as many threads as processors.
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "32"}
    layouts = [(*layout, "float32") for layout in LAYOUTS] + [(1, 1, "bfloat16"), (8, 4, "bfloat16")]
    child = subprocess.run(
        [sys.executable, "-c", SAMPLES, json.dumps(layouts)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr
    answers: dict[str, Any] = json.loads(child.stdout)
    return answers


def test_copies_on_eight_devices_sample_what_one_samples_with_a_row_on_each(sampled: dict[str, Any]) -> None:
    alone, together = sampled["1x1xfloat32"], sampled["8x1xfloat32"]
    assert together["tokens"] == alone["tokens"]
    assert len({tuple(tokens) for tokens in alone["tokens"]}) > 30
    assert [alone["groups"], together["groups"]] == [[0] * 8, list(range(8))]
    assert together["held"] == [1.0, 1.0]


def test_a_model_split_over_four_devices_samples_what_one_samples(sampled: dict[str, Any]) -> None:
    alone, split = sampled["1x1xfloat32"], sampled["8x4xfloat32"]
    assert split["tokens"] == alone["tokens"]
    for ours, theirs in zip(split["logprobs"], alone["logprobs"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=LOGPROB_TOLERANCE["float32"], rtol=0)
    assert split["held"] == [0.25, 0.25], "each device holds a quarter of a matrix"
    assert split["groups"] == [0] * 4 + [1] * 4, "two groups of devices share the rows"


def test_weights_of_a_split_model_are_swapped_while_rows_decode(sampled: dict[str, Any]) -> None:
    alone, split = sampled["1x1xfloat32"], sampled["8x4xfloat32"]
    assert split["swapped"] == alone["swapped"]
    assert sum(map(len, split["swapped"][1].values())) > 4, "rows went on after the swap"
    assert [each["compiled_later"] for each in sampled.values()] == [0] * len(sampled), "no shape is compiled twice"


def test_a_split_model_in_bfloat16_agrees_with_one_device_up_to_its_rounding(sampled: dict[str, Any]) -> None:
    alone, split = sampled["1x1xbfloat16"], sampled["8x4xbfloat16"]
    assert (split["dtype"], split["held"]) == ("bfloat16", [0.25, 0.25])
    same = [
        (ours[0], theirs[0])
        for ours, theirs, token, other in zip(
            split["logprobs"], alone["logprobs"], split["tokens"], alone["tokens"], strict=True
        )
        if token[0] == other[0]
    ]
    assert len(same) > 30, "most first tokens are the same"
    np.testing.assert_allclose(*zip(*same, strict=True), atol=LOGPROB_TOLERANCE["bfloat16"], rtol=0)
