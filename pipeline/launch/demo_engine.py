"""The demo with a third-party inference engine: vLLM, in a Python environment of its own, samples the rollouts.

It does not promise that the model learns, which takes a long time on an engine not made for tiny models. It promises
that the engine receives the policy versions: rollouts carry tokens of several versions, and each token names the
version that sampled it.
"""

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollstream.consumers.weights.manifests import none_whole, read_manifests
from rollstream.pipeline.command_line.command_parser import Setting
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.roles.engine import check_engine_python
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import Rollout
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode
from rollstream.topics.wire.rl_examples import WEIGHT_VERSION

STEPS = 40
"""Learner steps unless --steps says otherwise."""
NEEDED_VERSIONS = 3
"""Least number of versions that rollouts must carry."""
_REQUEST_TIMEOUT_S = 300.0
_STEPS_FLAG = "learner.max_steps="


@dataclass(frozen=True, kw_only=True)
class EngineUse:
    """Evidence, from the rollouts of a run, of what the engine that sampled them did."""

    engine: str
    """Kind of engine, as in serving.engine."""
    published: int
    """Number of policy versions published."""
    versions: int
    """Number of policy versions that sampled a token of a rollout."""
    rollouts_by_versions: Mapping[int, int]
    """Number of rollouts, by how many versions sampled their tokens; above 1 if weights changed during sampling."""
    unnamed: int
    """Number of rollouts with a token whose version is not known."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Promises that the engine did not keep; empty if the demo passes."""
        failures = []
        if self.versions < NEEDED_VERSIONS:
            failures.append(f"rollouts carry {self.versions} policy versions, at least {NEEDED_VERSIONS} were expected")
        if self.unnamed:
            failures.append(f"{self.unnamed:,} rollouts have tokens of no known version")
        return tuple(failures)

    def as_text(self) -> str:
        """Return a text that explains whether the demo passes."""
        mixed = sum(count for versions, count in self.rollouts_by_versions.items() if versions > 1)
        lines = (
            f"PASSED depends on the engine ({self.engine}), and not on success: of {self.published:,} policy",
            f"versions published, rollouts carry tokens of {self.versions:,}, and {NEEDED_VERSIONS} are needed;",
            f"{self.unnamed:,} rollouts have tokens of no known version, and 0 are allowed.",
            f"{mixed:,} rollouts carry several versions: weights changed while they were sampled.",
        )
        return "\n".join(lines)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a demo with a third-party engine."""
    parser.add_argument(
        "--engine",
        dest="serving.engine=",
        action=Setting,
        metavar="NAME",
        help="sample with a third-party engine: vllm, or vllm-plugin (with --engine-python)",
    )
    parser.add_argument(
        "--engine-python",
        dest="serving.python=",
        action=Setting,
        metavar="PATH",
        help="python of the environment in which that engine is installed",
    )


def with_engine(config: RunConfig, args: argparse.Namespace) -> RunConfig:
    """Return the configuration for the engine that the flags name, if they name one. Raises ConfigurationError."""
    if not config.serving.python:
        if getattr(args, "serving.engine=", None):
            raise ConfigurationError(
                "--engine needs --engine-python: the python of an environment in which that engine is installed"
            )
        return config
    check_engine_python(config.serving)
    if not getattr(args, _STEPS_FLAG, None):
        config = replace(config, learner=replace(config.learner, max_steps=min(config.learner.max_steps, STEPS)))
    # Compiling the model for its shapes would delay the start of the engine by minutes.
    flags = ("--enforce-eager", *config.serving.flags)
    timeout_s = max(config.worker.request_timeout_s, _REQUEST_TIMEOUT_S)
    return replace(
        config,
        serving=replace(config.serving, flags=flags),
        worker=replace(config.worker, request_timeout_s=timeout_s),
    )


def engine_use(config: RunConfig) -> EngineUse | None:
    """Return what the rollouts on the log show about the engine, or None if the run uses no third-party engine."""
    if not config.serving.python:
        return None
    versions: set[int] = set()
    by_versions: Counter[int] = Counter()
    unnamed = 0
    for message in read_to_end(config.kafka, topic_name(config.run, "rollouts")):
        record = decode(message.value)
        if isinstance(record, Rollout):
            of_tokens = {int(v) for v in record.token_arrays[WEIGHT_VERSION].array()[record.loss_mask]}
            unnamed += min(of_tokens, default=-1) < 0
            by_versions[len(of_tokens)] += 1
            versions |= of_tokens
    return EngineUse(
        engine=config.serving.engine,
        published=len(read_manifests(config.kafka, config.run, none_whole)),
        versions=len(versions - {-1}),
        rollouts_by_versions=dict(sorted(by_versions.items())),
        unnamed=unnamed,
    )
