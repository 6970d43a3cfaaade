"""Slots on several devices: the rows are those of one device, and each device has its share."""

import json
import os
import subprocess
import sys

from tests.support.paths import ROOT

SAMPLES = """
import json
import sys

import jax
import numpy as np

from rollstream.consumers.models import decoder
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.slots import Row, SlotDecoder

config = DecoderConfig(num_hidden_layers=1)
params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(3), config)
rows = [Row(prompt=[5 + i // 4] * (1 + i % 3), seed=i, max_tokens=1 + i % 7) for i in range(40)]
answers, shares = [], []
for devices in (1, 8):
    slots = SlotDecoder(config, slots=16, max_model_len=16, devices=devices, steps=3)
    placed = slots.place({name: np.asarray(array) for name, array in params.items()})
    answers.append([row.tokens for row in slots.sample(placed, rows)])
    started = slots.start(placed, rows[:8])
    shares.append(sorted(slot // (16 // devices) for slot in started))
json.dump([answers, shares], sys.stdout)
"""


def test_eight_devices_sample_what_one_samples_with_a_row_on_each() -> None:
    # A process of its own: this one has JAX already, with one device.
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    child = subprocess.run(
        [sys.executable, "-c", SAMPLES], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    (alone, together), shares = json.loads(child.stdout)
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) > 30
    assert shares == [[0] * 8, list(range(8))]
