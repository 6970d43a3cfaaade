"""Rows `swap` and `swap-vllm`: seconds from the parameters of a step to a server that answers with their version.

The server is ours, or a vLLM whose workers fetch versions from the log by our plug-in; each is a process of its own,
which shares the machine with the broker and the publisher. The baseline copies the same bytes through the broker.
"""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import Arrays
from rollstream.infra.broker.ports import free_port
from rollstream.topics.config import TopicsConfig
from rollstream.topics.wire.catalogue import topic_name
from tests.bench.measure import LatencyRow, Settings
from tests.bench.runs import prepared
from tests.bench.weights_row import changed, copying, publish, publishing
from tests.support.checkpoints import random_parameters
from tests.support.recipe import write_model
from tests.support.runs import RealRun
from tests.support.vllm_server import vllm_server
from tests.support.waiting import eventually

_SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
_READY_S = 600.0
_POLL_S = 0.02
Swapped = Callable[[], int]
"""The version that a server answers with now."""


def row(name: str, engine: str) -> Callable[[Settings], LatencyRow]:
    """Return the row of our server (infer) or of vLLM (vllm-plugin)."""
    serving = {"infer": _ours, "vllm-plugin": _vllm}[engine]

    def measure(settings: Settings) -> LatencyRow:
        directory = settings.directory / name
        directory.mkdir()
        config = write_model(directory / "model", **_SHAPE)
        arrays = {key: array.astype(ml_dtypes.bfloat16) for key, array in random_parameters(config).items()}
        size_bytes = sum(array.nbytes for array in arrays.values())
        ours: list[tuple[float, ...]] = []
        raw: list[tuple[float, ...]] = []
        with prepared(settings, name) as run:
            _published(settings, run, config, [arrays], lambda: 0, anchor_every=1)
            role = RealRun(settings.kafka, run, directory, TopicsConfig(partitions=settings.partitions))
            try:
                with (
                    serving(role, directory / "model") as swapped,
                    copying(settings, topic_name(run, "batches")) as copy,
                ):
                    eventually(lambda: swapped() == 0, _READY_S, "the server has version 0")
                    for _ in range(settings.repetitions):
                        raw.append((_copied(copy, arrays),))
                        ours.append(tuple(_published(settings, run, config, [arrays], swapped, anchor_every=1)))
                    one, three = changed(arrays, 0.01), changed(arrays, 0.03)
                    _full, *deltas = _published(
                        settings, run, config, [arrays, *(one, arrays, three, arrays) * settings.repetitions], swapped
                    )
            finally:
                role.stop()
        return LatencyRow(
            name=name,
            what=f"parameters of a step ({size_bytes / 1e6:.0f} MB) until {engine} answers with their version, in full",
            baseline="send the same bytes in chunks of the same size and read them back",
            ours=tuple(ours),
            raw=tuple(raw),
            figures={
                "s in full": median(second for seconds in ours for second in seconds),
                "s as a delta of 1 %": median(deltas[0::4] + deltas[1::4]),
                "s as a delta of 3 %": median(deltas[2::4] + deltas[3::4]),
            },
        )

    return measure


def _published(
    settings: Settings, run: str, config: DecoderConfig, versions: list[Arrays], swapped: Swapped, **weights: Any
) -> list[float]:
    """Publish versions, each once the server answers with the one before; return the seconds that each took."""
    seconds = []
    with publishing(settings, run, WeightsConfig(**weights), json.dumps(asdict(config))) as (log, source):
        for arrays in versions:
            began = time.perf_counter()
            version = publish(source, log, arrays).version
            while swapped() < version:
                if time.perf_counter() - began > _READY_S:
                    raise RuntimeError(f"the server did not answer with version {version} within {_READY_S:g} s")
                time.sleep(_POLL_S)
            seconds.append(time.perf_counter() - began)
    return seconds


def _copied(copy: Callable[[bytes, int], None], arrays: Arrays) -> float:
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    began = time.perf_counter()
    copy(data, WeightsConfig().chunk_bytes)
    return time.perf_counter() - began


@contextmanager
def _ours(role: RealRun, model: Path) -> Iterator[Swapped]:
    port = free_port("127.0.0.1")
    small = {"inference__max_model_len": 64, "inference__max_rows": 4}
    role.start("infer", learner__pretrained=model, inference__port=port, **small)
    yield lambda: _asked(f"http://127.0.0.1:{port}/v1/models", lambda body: body["data"][0]["policy_version"])


@contextmanager
def _vllm(role: RealRun, model: Path) -> Iterator[Swapped]:
    with vllm_server(model, role.directory / "vllm.log", "--skip-tokenizer-init") as url:
        role.start("serve-weights", "--engine", "vllm-plugin", "--url", f"{url}/v1")
        yield lambda: _asked(f"{url}/weight_info", lambda body: body["weight_version"])


def _asked(url: str, version_of: Callable[[Any], Any]) -> int:
    """The version that the server names; -1 where it does not answer yet, or names none."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return int(version_of(json.loads(answer.read())))
    except (OSError, KeyError, IndexError, TypeError, ValueError):
        return -1
