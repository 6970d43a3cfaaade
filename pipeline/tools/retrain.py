"""`rollstream retrain`: execute recorded steps again from a checkpoint and the log, and compare what comes out.

Exit code 0 when every step gives the parameters on record, 1 when one does not. Nothing is written to the run.
"""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.config import RunConfig
from pipeline.roles.jax_runtime import prepare_jax
from pipeline.tables import clipped, table
from pipeline.warm_start import warm_start_examples
from topics import clients

if TYPE_CHECKING:
    from consumers.learner.retrain import RetrainedStep, Retraining

_DIGEST = 16
"""Characters of a digest that are shown to people."""
_VALUE = 60
"""The same of a setting."""


def show_retraining(config: RunConfig, args: argparse.Namespace) -> int:
    """Print a line for each step, and the first difference with what may have led to it."""
    clients.check_broker(config.kafka)
    prepare_jax(config)
    from consumers.learner.retrain import retrain

    def progress(step: "RetrainedStep") -> None:
        if sys.stderr.isatty():
            print(f"\rstep {step.step}", end="", file=sys.stderr, flush=True)

    found = retrain(
        config.learner,
        config.kafka,
        config.run,
        args.from_step,
        args.to_step,
        warm_start_examples=lambda: warm_start_examples(config),
        on_step=progress,
    )
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    print(json.dumps(as_dict(found)) if args.json else text_of(found))
    return 0 if found.difference is None else 1


def as_dict(found: "Retraining") -> dict[str, Any]:
    """What came of it as programs read it."""
    difference = found.difference
    return {
        "learner": found.learner,
        "checkpoint": found.checkpoint,
        "to_step": found.last,
        "same": difference is None,
        "first_difference": None if difference is None else difference.step,
        "environment": {name: {"then": then, "now": now} for name, (then, now) in found.environment.items()},
        "steps": [{**asdict(step), "same": step.same} for step in found.steps],
    }


def text_of(found: "Retraining") -> str:
    """What came of it for people."""
    rows = [
        (s.step, s.batches, s.trained, s.skipped, s.recorded[:_DIGEST], "the same" if s.same else s.again[:_DIGEST])
        for s in found.steps
    ]
    begun = "initial parameters, made again" if found.checkpoint is None else f"checkpoint of step {found.checkpoint}"
    parts = [
        f"learner {found.learner}: begun with the {begun}",
        table(("step", "batches", "trained", "skipped", "parameters on record", "executed again"), rows),
        _verdict(found),
    ]
    if found.environment:
        changed = [
            (name, clipped(then, _VALUE) or "-", clipped(now, _VALUE) or "-")
            for name, (then, now) in found.environment.items()
        ]
        parts.append(table(("not as at the checkpoint", "then", "now"), changed))
    return "\n\n".join(parts)


def _verdict(found: "Retraining") -> str:
    difference, executed = found.difference, len(found.steps) - 1
    if difference is None:
        return f"{executed} steps executed again from the log, every one with the parameters on record"
    where = f"STEP {difference.step} DIFFERS"
    if not executed:
        where = f"WHAT STEP {difference.step} LEFT DIFFERS, before anything was executed"
    return (
        f"{where}: on record\n  {difference.recorded}\nexecuted again\n  {difference.again}\n"
        f"steps after it were not executed (up to {found.last} were asked for)"
    )
