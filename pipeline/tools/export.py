"""`rollstream export`: the newest policy version that the log holds whole, as a Hugging Face checkpoint, for engines
and evaluations. Newer ones that cannot be had are named on standard error.

Tokenizer and generation settings are copied from `learner.pretrained` where the run started from a checkpoint.
"""

import argparse
import json
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from consumers.models import huggingface
from consumers.models.config import DecoderConfig
from consumers.weights.fetcher import ChunkFetcher, ChunksGone, ChunksLate
from consumers.weights.layout import WeightsRefused, assemble
from consumers.weights.publisher import read_manifests
from pipeline.config import RunConfig
from topics import clients
from topics.errors import ConfigurationError, TopicError

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
    """Write the newest version that can be had; returns its number.

    Raises ConfigurationError where none is published or no family of Hugging Face's has such a model, TopicError where
    none can be had, CheckpointRefused where the directory holds a model already.
    """
    clients.check_broker(config.kafka)
    version, model, arrays = _newest(config)
    huggingface.save(directory, model, arrays, dtype=dtype)
    for name in _COPIED:
        source = Path(config.learner.pretrained) / name
        if config.learner.pretrained and source.exists():
            shutil.copyfile(source, directory / name)
    return version


def _newest(config: RunConfig) -> tuple[int, DecoderConfig, dict[str, NDArray[Any]]]:
    tried: set[int] = set()
    with closing(ChunkFetcher(config.kafka, config.run)) as fetcher:
        # Read again each time: while one is fetched, its learner may replace it.
        while untried := (published := read_manifests(config.kafka, config.run)).keys() - tried:
            manifest = published[max(untried)]
            tried.add(manifest.version)
            try:
                if manifest.kind == "external":
                    raise WeightsRefused("its weights are not on the log")
                model = DecoderConfig(**json.loads(manifest.model))
                chunks = fetcher.fetch(manifest, timeout_s=config.learner.weights.fetch_timeout_s)
                return manifest.version, model, assemble(manifest, chunks)
            except (ChunksGone, ChunksLate, WeightsRefused, TypeError, ValueError) as error:
                print(f"passed over policy version {manifest.version}: {error}", file=sys.stderr)
    if not tried:
        raise ConfigurationError(f"run {config.run} has no policy version yet; is the learner running?")
    raise TopicError(f"run {config.run} has no policy version that can be exported; see why above")
