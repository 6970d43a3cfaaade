"""The role `learn`: one learner, warm-started on what the task teaches of its format."""

import argparse
import threading

import numpy as np

from consumers.models.tokenizer import CharacterTokenizer
from pipeline.config import RunConfig
from pipeline.process import announce_ready, stop_on_signals
from pipeline.roles.jax_runtime import prepare_jax
from producers.tasks import create_task
from topics import clients

WARM_START_EXAMPLES = 2048


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Train until the last step or until the lead is told to stop; a checkpoint is on disk afterwards."""
    task = create_task(config.task)
    clients.check_broker(config.kafka)
    prepare_jax(config)
    from consumers.learner.learner import Example, learn
    from consumers.learner.team import join

    def examples() -> list[Example]:
        tokenizer = CharacterTokenizer()
        return [
            encode_example(tokenizer, prompt, answer)
            for prompt, answer in task.warm_start_examples(config.seed, WARM_START_EXAMPLES)
        ]

    stop = threading.Event()

    def ready() -> None:
        # Before its first step is on record there is nothing to drain, and a signal ends the process at once.
        stop_on_signals(stop)
        announce_ready()

    learn(
        config.learner,
        config.kafka,
        config.run,
        warm_start_examples=examples,
        stop=stop,
        team=join(config.learner, args.process),
        on_ready=ready,
    )
    return 0


def encode_example(
    tokenizer: CharacterTokenizer, prompt: str, answer: str
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Tokens int32 [T] of prompt, answer and end; mask bool [T], true where the answer and the end are."""
    before, after = tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_id]
    mask = [False] * len(before) + [True] * len(after)
    return np.asarray(before + after, np.int32), np.asarray(mask, np.bool_)
