"""`rollstream deploy fit`: checks whether a learner fits on TPUs, by compiling its training step without them.

Exit code 0 if it fits, or if the memory of the device is not known; 1 if it does not fit, or if libtpu aborts. Needs
the extra `tpu`, but no broker.
"""

import argparse
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rollstream.pipeline.audit.process_pool import ProcessLost, run_apart
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.text_tables import table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run.jax_runtime import require_jax
from rollstream.topics.errors import RollstreamError

if TYPE_CHECKING:
    from rollstream.consumers.learner.config import LearnerConfig
    from rollstream.consumers.learner.training.tpu_compilation import CompilationFit

_FATAL = re.compile(r"^F\d{4} \S+ +\d+ (?P<place>\S+)\] (?P<text>.*)$", re.MULTILINE)
"""The line that libtpu writes before it aborts its process, in the format of Abseil's log."""


class CompilerLost(RollstreamError):
    """libtpu ended the process in which it compiled."""

    exit_code = 1


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream deploy fit`."""
    set_handler(
        parser, show_fit, example="rollstream deploy fit v5e:2x4 --config run.toml --set learner.mesh.fsdp=8", json=True
    )
    parser.add_argument(
        "topology", metavar="TOPOLOGY", help="libtpu's name of the topology, e.g. v5e:2x4, v5e:4x4, v6e:4x4"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="optimize less than a learner does, which is faster and gives about the same memory",
    )


def show_fit(config: RunConfig, args: argparse.Namespace) -> int:
    """Compile, and print the memory that each device would need."""
    require_jax()
    from rollstream.consumers.learner.pretrained import resolved

    fit = compiled_apart(resolved(config.learner), args.topology, quick=args.quick)
    print(json.dumps({**asdict(fit), "fits": fit.fits}) if args.json else text_of(fit))
    return 1 if fit.fits is False else 0


def compiled_apart(learner: "LearnerConfig", topology: str, *, quick: bool) -> "CompilationFit":
    """Compile in a separate process. Raises CompilerLost if libtpu aborts it, as it does for some programs."""
    with TemporaryDirectory() as folder:
        errors = Path(folder) / "errors"
        try:
            return run_apart(_compile, (learner, topology, quick, errors))
        except ProcessLost as lost:
            text = errors.read_text(errors="replace") if errors.exists() else ""
            fatal = _FATAL.search(text)
            why = f"{fatal['text'].strip()} ({fatal['place']})" if fatal else str(lost)
            remedy = (
                "compile without --quick" if quick else "try another learner.mesh, e.g. with more fsdp and less data"
            )
            raise CompilerLost(f"libtpu could not compile for {topology}, and aborted: {why}; {remedy}") from None


def _compile(job: tuple["LearnerConfig", str, bool, Path]) -> "CompilationFit":
    learner, topology, quick, errors = job
    # Redirect standard error before libtpu is loaded, because an abort writes pages of addresses to it.
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    from rollstream.consumers.learner.training.tpu_compilation import compile_for

    return compile_for(learner, topology, quick=quick)


def text_of(fit: "CompilationFit") -> str:
    """Return a table of the memory that the training step needs."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in fit.mesh.items())
    rows = [
        (item.name, f"{item.seconds:.1f}", *map(_gib, (item.arguments_bytes, item.temporaries_bytes, item.peak_bytes)))
        for item in fit.functions
    ]
    hosts = f"{fit.processes} host{'s' if fit.processes > 1 else ''}"
    have = "; the device's memory is not known"
    if fit.hbm_bytes is not None:
        have = f" of {_gib(fit.hbm_bytes)} GiB: it {'fits' if fit.fits else 'does not fit'}"
    return "\n".join(
        (
            f"{fit.devices} x {fit.device} on {hosts}, {mesh}; {fit.parameters / 1e6:,.1f} million parameters",
            table(("function", "compiled in s", "arguments GiB", "temporaries GiB", "peak GiB"), rows),
            f"each device keeps {_gib(fit.state_bytes)} GiB of parameters and optimizer, copies "
            f"{_gib(fit.checkpoint_bytes)} GiB for a checkpoint and {_gib(fit.snapshot_bytes)} GiB to publish,",
            f"and needs at most {_gib(fit.peak_bytes)} GiB{have}",
        )
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f}"
