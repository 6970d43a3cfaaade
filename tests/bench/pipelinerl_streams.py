"""Baseline of `stream-pipelinerl`: PipelineRL's streams, in a Python that has them.

As its actor does, each group is written as one list of dictionaries. Streams are files by default; JSON has no int32,
float32 or bool arrays, so labels stand for the mask, as in PipelineRL.
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from pipelinerl.rollouts import TrainingText
from pipelinerl.streams import SingleStreamSpec, read_stream, set_streams_backend, write_to_streams

from tests.bench.measure import Stopwatch, Timing

_UNTRAINED = -100
"""Label of a position that is not trained on."""


def measure(rollouts: int, length: int, size: int, directory: Path) -> Timing:
    """Write rollouts of `length` tokens in groups of `size` to a stream, then read them back."""
    texts = _texts(length, size)
    stream = SingleStreamSpec(exp_path=directory, topic="actor")
    set_streams_backend("files")
    watch, groups = Stopwatch(), max(1, rollouts // size)
    with write_to_streams(stream) as writer:
        for group in range(groups):
            members = (texts[(group * size + member) % len(texts)] for member in range(size))
            writer.write([text.model_dump() for text in members])
    with read_stream(stream) as reader:
        read = sum(len(group) for group in itertools.islice(reader.read(), groups))
    if read != groups * size:
        raise RuntimeError(f"{read} rollouts came back instead of {groups * size}")
    return watch.timing(read)


def _texts(length: int, size: int) -> list[TrainingText]:
    generator, prompt = np.random.default_rng(0), length // 8
    texts = []
    for number in range(64):
        tokens = generator.integers(0, 32_000, length).tolist()
        logprobs = -generator.exponential(1.0, length - prompt).astype("<f4")
        texts.append(
            TrainingText(
                text="a question an answer",
                n_predicted=len("an answer"),
                reward=float(number % 2),
                logprobs=logprobs.tolist(),
                input_ids=tokens,
                labels=[_UNTRAINED] * prompt + tokens[prompt:],
                group_id=str(number // size),
                finished=True,
                prompt_tokens=prompt,
                output_tokens=length - prompt,
                metadata={"model_version": 0, "rollout_index": number, "step_index": 0},
            )
        )
    return texts


def main(arguments: dict[str, Any]) -> None:
    """Print the timing, as `in_child` expects it."""
    print("ready", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        sizes = (arguments[name] for name in ("rollouts", "tokens", "group_size"))
        print(json.dumps(measure(*sizes, Path(directory))._asdict()))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
