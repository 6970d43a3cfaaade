"""`rollstream weights export`: writes the newest policy version that can be fetched as a Hugging Face checkpoint.

It fetches the version into temporary files in the directory, and holds one tensor in memory at a time. Newer versions
that cannot be fetched are named on standard error. Tokenizer and generation settings are copied from
`learner.pretrained` if the run started from a checkpoint.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from rollstream.consumers.models.adapters import save_merged, save_peft
from rollstream.consumers.models.config import DecoderConfig, decoder_config
from rollstream.consumers.weights.chains import ChainBroken, with_bases
from rollstream.consumers.weights.content import ChunksGone, ChunksLate, WeightsRefused
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.consumers.weights.spooled_version import SpooledVersion
from rollstream.pipeline.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.topics.errors import ConfigurationError, TopicError
from rollstream.topics.kafka import clients
from rollstream.topics.records import PolicyManifest


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream weights export`."""
    example = "rollstream weights export --config run.toml trained --dtype bfloat16"
    set_handler(parser, show_export, example=example, json=True)
    parser.add_argument(
        "directory", type=Path, metavar="DIRECTORY", help="directory to write to, without a model in it"
    )
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="write only the adapters, as PEFT files; by default, they are merged into the model",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the stored parameters (default: as published)",
    )


def show_export(config: RunConfig, args: argparse.Namespace) -> int:
    """Export, and print the version and the directory."""
    version = export(config, args.directory, args.dtype, adapters=args.adapters)
    if args.json:
        print(json.dumps({"run": config.run, "policy_version": version, "directory": str(args.directory)}), flush=True)
    else:
        print(f"policy version {version} of run {config.run}: {args.directory}", flush=True)
    return 0


def export(config: RunConfig, directory: Path, dtype: str | None, *, adapters: bool = False) -> int:
    """Write the newest version that can be fetched, or only its adapters as PEFT files; return the version's number.

    Raises ConfigurationError if no version is published, if it has no adapters to write, or if its model has no
    counterpart at Hugging Face, TopicError if no version can be fetched, or CheckpointRefused if the directory already
    holds a model.
    """
    clients.check_broker(config.kafka)
    model, version = _newest(config, directory)
    with version:
        if adapters:
            save_peft(directory, model, version.tensors, base=config.learner.pretrained, dtype=dtype)
        else:
            save_merged(directory, model, version.tensors, companions=config.learner.pretrained, dtype=dtype)
    return version.manifest.version


def _newest(config: RunConfig, directory: Path) -> tuple[DecoderConfig, SpooledVersion]:
    tried: set[int] = set()

    def newest_untried(known: Mapping[int, PolicyManifest]) -> set[int]:
        return with_bases(known, max(known.keys() - tried, default=-1))

    with ChunkFetcher(config.kafka, config.run, files_at_once=config.learner.weights.files_at_once) as fetcher:
        # Manifests are read again each time: a learner may replace a version while it is fetched.
        while untried := (published := read_manifests(config.kafka, config.run, newest_untried)).keys() - tried:
            manifest = published[max(untried)]
            tried.add(manifest.version)
            try:
                model = decoder_config(manifest.model)
                timeout_s = config.learner.weights.fetch_timeout_s
                return model, SpooledVersion(fetcher, published, manifest.version, directory, timeout_s=timeout_s)
            except (ChainBroken, ChunksGone, ChunksLate, WeightsRefused, ConfigurationError) as error:
                print(f"skipped policy version {manifest.version}: {error}", file=sys.stderr)
    if not tried:
        raise ConfigurationError(f"run {config.run} has no policy version yet; start its learner")
    raise TopicError(f"run {config.run} has no policy version that can be exported; the reasons are above")
