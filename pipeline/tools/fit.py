"""`rollstream fit`: whether a learner as configured fits on TPUs that are not here, by compiling its training step.

Exit code 0 where it does, 1 where it does not. Needs the extra `tpu`, and no broker.
"""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeline.config import RunConfig
from pipeline.roles.jax_runtime import require_jax
from pipeline.tables import table

if TYPE_CHECKING:
    from consumers.learner.aot import Fit


def show_fit(config: RunConfig, args: argparse.Namespace) -> int:
    """Compile and print what each device would hold."""
    require_jax()
    from consumers.learner.aot import compile_for
    from consumers.learner.pretrained import resolved

    found = compile_for(resolved(config.learner), args.topology, quick=not args.thorough)
    print(json.dumps({**asdict(found), "fits": found.fits}) if args.json else text_of(found))
    return 1 if found.fits is False else 0


def text_of(found: "Fit") -> str:
    """What it takes, for people."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in found.mesh.items())
    rows = [
        (item.name, f"{item.seconds:.1f}", *map(_gib, (item.arguments_bytes, item.temporaries_bytes, item.peak_bytes)))
        for item in found.functions
    ]
    hosts = f"{found.processes} host{'s' if found.processes > 1 else ''}"
    have = "of a device whose memory is not known"
    if found.hbm_bytes is not None:
        have = f"of {_gib(found.hbm_bytes)} GiB: it {'fits' if found.fits else 'does not fit'}"
    return "\n".join(
        (
            f"{found.devices} x {found.device} on {hosts}, {mesh}; {found.parameters / 1e6:,.1f} million parameters",
            table(("function", "compiled in s", "arguments GiB", "temporaries GiB", "peak GiB"), rows),
            f"each device keeps {_gib(found.state_bytes)} GiB of parameters and optimizer and holds at most "
            f"{_gib(found.peak_bytes)} GiB {have}",
        )
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f}"
