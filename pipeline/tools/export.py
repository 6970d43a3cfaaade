"""`rollstream export`: the newest policy version of a run as a Hugging Face checkpoint, for engines and evaluations.

Tokenizer and generation settings are copied from `learner.pretrained` where the run started from a checkpoint.
"""

import argparse
import json
import shutil
from pathlib import Path

from consumers.models import huggingface
from consumers.models.config import DecoderConfig
from consumers.weights.follower import WeightsFollower
from consumers.weights.publisher import read_manifests
from pipeline.config import RunConfig
from topics import clients
from topics.errors import ConfigurationError

_TIMEOUT_S = 600.0
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def show_export(config: RunConfig, args: argparse.Namespace) -> int:
    """Export and say what was written."""
    version = export(config, args.directory, args.dtype)
    if args.json:
        print(json.dumps({"run": config.run, "policy_version": version, "directory": str(args.directory)}), flush=True)
    else:
        print(f"policy version {version} of run {config.run}: {args.directory}", flush=True)
    return 0


def export(config: RunConfig, directory: Path, dtype: str | None) -> int:
    """Write the newest version; returns its number.

    Raises ConfigurationError where none is published or no family of Hugging Face's has such a model,
    CheckpointRefused where the directory holds a model already.
    """
    clients.check_broker(config.kafka)
    published = read_manifests(config.kafka, config.run)
    if not published:
        raise ConfigurationError(f"run {config.run} has no policy version yet; is the learner running?")
    with WeightsFollower(config.kafka, config.run, config=config.learner.weights) as follower:
        version, arrays = follower.wait_for(max(published), _TIMEOUT_S)
    # Of all versions of a run alike.
    model = DecoderConfig(**json.loads(published[max(published)].model))
    huggingface.save(directory, model, arrays, dtype=dtype)
    for name in _COPIED:
        source = Path(config.learner.pretrained) / name
        if config.learner.pretrained and source.exists():
            shutil.copyfile(source, directory / name)
    return version
