"""`rollstream weights export`: writes a policy version, by default the newest that can be fetched, as a Hugging Face
checkpoint or as plain arrays.

It fetches the version into temporary files in the directory, and holds one tensor in memory at a time. Newer versions
that cannot be fetched are named on standard error. Tokenizer and generation settings are copied from
`learner.pretrained` if the run started from a checkpoint.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rollstream.consumers.files import npz_files, safetensors_files
from rollstream.consumers.models import huggingface
from rollstream.consumers.models.adapters import save_merged, save_peft
from rollstream.consumers.models.config import DecoderConfig, decoder_config
from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.consumers.models.tokenizer_file import write_character_tokenizer
from rollstream.consumers.weights.chains import ChainBroken, SpooledTensor, SpooledVersion, with_bases
from rollstream.consumers.weights.content import ChunksGone, ChunksLate, WeightsRefused
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import compact
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools.published_versions import fetching, read_whole
from rollstream.topics.errors import ConfigurationError, TopicError
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.open_transactions import await_markers
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.catalogue import topic_name


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream weights export`."""
    example = "rollstream weights export -o trained --config run.toml --dtype bfloat16"
    set_handler(parser, show_export, example=example, json=True)
    parser.add_argument(
        "version", type=int, nargs="?", metavar="V", help="number of the version (default: the newest that is whole)"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="directory to write into")
    parser.add_argument(
        "--format",
        choices=("safetensors", "published", "npz"),
        default="safetensors",
        help="safetensors, with config.json and merged adapters if the model is known; published, the tensors as they "
        "were published, with adapters apart, in one safetensors file; or npz, with bfloat16 as float32",
    )
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="write only the adapters, as PEFT files; by default, they are merged into the model",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the parameters of a checkpoint (default: as published)",
    )


def show_export(config: RunConfig, args: argparse.Namespace) -> int:
    """Export, and print the version and where it lies."""
    if args.version is None:
        version = _newest(config, args.output)
    else:
        versions = read_whole(config, args.version)
        timeout_s = config.learner.weights.fetch_timeout_s
        with fetching(config, args.version) as fetcher:
            version = SpooledVersion(fetcher, versions, args.version, args.output, timeout_s=timeout_s)
    with version:
        path = _write(config, args, version)
    manifest = version.manifest
    answer = {"run": config.run, "policy_version": manifest.version, "path": str(path), "digest": manifest.digest}
    print(
        compact(answer) if args.json else f"policy version {manifest.version} of run {config.run}: {path}", flush=True
    )
    return 0


def export_newest(config: RunConfig, directory: Path) -> int:
    """Write the newest version that can be fetched as a checkpoint; return the version's number.

    Raises ConfigurationError if no version is published or its model has no counterpart at Hugging Face, TopicError if
    no version can be fetched, or CheckpointRefused if the directory already holds a model.
    """
    with _newest(config, directory) as version:
        model = decoder_config(version.manifest.model)
        _write_checkpoint(config, directory, model, version)
    return version.manifest.version


def _write(config: RunConfig, args: argparse.Namespace, version: SpooledVersion) -> Path:
    """Write a version in a format, and return the path of its file, or of the directory of a checkpoint."""
    model, name = _model_of(version.manifest), f"version-{version.manifest.version}"
    path: Path = args.output
    if args.adapters:
        model = decoder_config(version.manifest.model)
        save_peft(path, model, version.tensors, base=config.learner.pretrained, dtype=args.dtype)
    elif args.format == "npz":
        path /= f"{name}.npz"
        _write_npz(path, version.tensors)
    elif args.format == "safetensors" and model is not None:
        _write_checkpoint(config, path, model, version, args.dtype)
    else:
        path /= f"{name}.safetensors"
        safetensors_files.write(path, version.tensors)
    return path


def _write_checkpoint(
    config: RunConfig, directory: Path, model: DecoderConfig, version: SpooledVersion, dtype: str | None = None
) -> None:
    """Write a checkpoint with its tokenizer: that of `learner.pretrained`, or else the one of the small model."""
    save_merged(directory, model, version.tensors, companions=config.learner.pretrained, dtype=dtype)
    tokenizer = CharacterTokenizer()
    if not config.learner.pretrained and model.vocab_size == tokenizer.vocab_size:
        write_character_tokenizer(directory, tokenizer)


def _write_npz(path: Path, arrays: Mapping[str, SpooledTensor]) -> None:
    """Write arrays by name. Dtypes that numpy's files cannot name are written as float32, which holds their values."""
    floats = huggingface.converted_lazily
    named: dict[str, safetensors_files.Storable] = {
        name: floats(array, np.float32) if array.dtype.kind == "V" else array for name, array in arrays.items()
    }
    npz_files.write(path, named)


def _model_of(manifest: PolicyManifest) -> DecoderConfig | None:
    """Return the model in a manifest; None if it is not one of rollstream's models."""
    try:
        return decoder_config(manifest.model)
    except ConfigurationError:
        return None


def _newest(config: RunConfig, directory: Path) -> SpooledVersion:
    clients.check_broker(config.kafka)
    await_markers(config.kafka, topic_name(config.run, "policies"))
    tried: set[int] = set()

    def newest_untried(known: Mapping[int, PolicyManifest]) -> set[int]:
        return with_bases(known, max(known.keys() - tried, default=-1))

    with ChunkFetcher(config.kafka, config.run, files_at_once=config.learner.weights.files_at_once) as fetcher:
        # Manifests are read again each time: a learner may replace a version while it is fetched.
        while untried := (published := read_manifests(config.kafka, config.run, newest_untried)).keys() - tried:
            manifest = published[max(untried)]
            tried.add(manifest.version)
            try:
                timeout_s = config.learner.weights.fetch_timeout_s
                return SpooledVersion(fetcher, published, manifest.version, directory, timeout_s=timeout_s)
            except (ChainBroken, ChunksGone, ChunksLate, WeightsRefused, ConfigurationError) as error:
                print(f"skipped policy version {manifest.version}: {error}", file=sys.stderr)
    if not tried:
        raise ConfigurationError(f"run {config.run} has no policy version yet; start its learner")
    raise TopicError(f"run {config.run} has no policy version that can be exported; the reasons are above")
