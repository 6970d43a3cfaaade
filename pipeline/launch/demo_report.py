"""The report of a demo, for programs and for people.

Pure. `passed` is the demo's promise: the model learned, every record is in one place, every batch follows from the log.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rollstream.pipeline.audit.texts import ledger_text, verification_text
from rollstream.pipeline.command_line.text_tables import bytes_text, clipped, command_text, table
from rollstream.pipeline.launch.demo_faults import Fault, faults_text, plain_faults

if TYPE_CHECKING:
    from rollstream.pipeline.index.lineage import LineageNode
    from rollstream.pipeline.launch.demo_engine import EngineUse
    from rollstream.pipeline.tools.replay import ReplayComparison

_WIDTH = 100
_DECISIVE = "success, rollouts produced"


@dataclass(frozen=True, kw_only=True)
class HeldOutScore:
    """Greedy answers to the held-out prompts that are evaluated, at one policy version."""

    version: int
    prompts: int
    reward: float
    success: float


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """Results of a demo."""

    run: str
    task: str
    seed: int
    outcome: str
    """Reason why training ended, as text."""
    reward_first: float
    reward_last: float
    success_first: float
    success_last: float
    heldout_first: HeldOutScore
    heldout_last: HeldOutScore
    rollouts: int
    batches: int
    steps: int
    seconds: float
    """Time from the start of the command to this report."""
    training_seconds: float
    """Time from the start of the workers to the end of training."""
    warm_start_steps: int
    demonstrated: float | None = 0.0
    """Share of the examples of the warm start that show the right answer; None if that is not known."""
    window: int = 1000
    """Number of rollouts in the means at the start and at the end."""
    needed_gain: float = 0.5
    """Smallest rise of success, over the rollouts produced, with which the demo passes."""
    engine: "EngineUse | None" = None
    """Use of a third-party engine, which decides instead of success; None if rollstream's own server sampled."""
    topic_bytes: Mapping[str, int]
    """Bytes of keys and values that went through each topic."""
    ledger: Mapping[str, Any]
    verify: Mapping[str, Any]
    faults: tuple[Fault, ...] = ()
    """Processes killed on the way."""
    lineage: "LineageNode | None" = None
    """Lineage of one rollout, in both directions."""
    replay: "ReplayComparison | None" = None
    """Replay of the log with another estimator."""
    kept: bool
    places: Mapping[str, str] = field(default_factory=dict)
    """Paths of logs, checkpoints, report and data."""
    next: tuple[str, ...] = ()
    """Commands to try next."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Promises that did not hold; empty if the demo passed."""
        failures: list[str] = []
        gain = self.success_last - self.success_first
        if self.engine is not None:
            failures += self.engine.failures
        elif gain < self.needed_gain:
            failures.append(f"success rose by {gain:.3f}, at least {self.needed_gain} was expected")
        if not self.ledger["balanced"]:
            failures.append("the ledger does not balance")
        if self.verify["mismatches"]:
            failures.append(f"verification found {self.verify['mismatches']:,} differences")
        return tuple(failures)

    @property
    def passed(self) -> bool:
        """Whether every promise held."""
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values for JSON."""
        values = asdict(replace(self, faults=(), lineage=None, replay=None))
        values["faults"] = plain_faults(self.faults)
        values["lineage"] = None if self.lineage is None else self.lineage.as_dict()
        values["replay"] = None if self.replay is None else self.replay.as_dict()
        for name in ("first", "last"):
            evaluation = values.pop(f"heldout_{name}")
            for key, value in evaluation.items():
                values[f"heldout_{key}_{name}"] = value
        values["selection"] = self.ledger["selection"]
        return {**values, "passed": self.passed, "failures": list(self.failures)}

    def as_text(self) -> str:
        """The report for people."""
        parts = (
            self._learning(),
            self._flow(),
            faults_text(self.faults),
            self._books(),
            self._queries(),
            self._places(),
        )
        return "\n\n".join(filter(None, parts))

    def _learning(self) -> str:
        first, last = self.heldout_first, self.heldout_last
        rows = [
            ("reward, rollouts produced", self.reward_first, self.reward_last),
            (_DECISIVE if self.engine else f"{_DECISIVE} (decides)", self.success_first, self.success_last),
            (f"success, {first.prompts} held-out prompts (greedy)", first.success, last.success),
        ]
        start = f"first {self.window:,}, version {first.version}"
        end = f"last {self.window:,}, version {last.version}"
        return (
            f"{self.task}, seed {self.seed}: {self.outcome}, {self.training_seconds:.0f} s of training, "
            f"{self.seconds:.0f} s in all\n\n{table(('', start, end), rows)}\n\n{self._decision()}\n\n"
            f"{self._warm_start()}"
        )

    def _warm_start(self) -> str:
        """Text that says what the model was taught before it was rewarded for anything."""
        seen = f"Before version 0 the model trained for {self.warm_start_steps} supervised steps on"
        if self.demonstrated is None:
            return f"{seen} the examples of their formats that the\nenvironments offer."
        if self.demonstrated:
            return (
                f"{seen} examples of which {self.demonstrated:.0%} show the\nright answer: what they taught is in the "
                "first column,\nand the rise to the second is due to rewards alone."
            )
        return f"{seen} answers shuffled across prompts:\nthey teach the format of an answer, not the task."

    def _decision(self) -> str:
        """Text that explains which accuracy decides, and why."""
        if self.engine is not None:
            return self.engine.as_text()
        prompts = self.heldout_last.prompts
        return (
            f"PASSED depends on {_DECISIVE}: it rose by {self.success_last - self.success_first:.3f}, and "
            f"{self.needed_gain} is needed.\nIt is measured over {self.window:,} sampled answers, trained on or not; "
            f"its standard error is at most {_standard_error(self.window):.3f}.\n"
            f"Over {prompts} held-out answers the standard error is at most {_standard_error(prompts):.3f}; they show "
            "whether the task\nwas learned, rather than the prompts."
        )

    def _flow(self) -> str:
        counts = f"{self.rollouts:,} rollouts, {self.batches:,} batches, {self.steps:,} learner steps"
        rows = [(name, bytes_text(size)) for name, size in self.topic_bytes.items() if size]
        return f"{counts}\n\n{table(('topic', 'bytes through it'), rows)}"

    def _books(self) -> str:
        return f"{ledger_text(self.ledger)}\n{verification_text(self.verify)}"

    def _queries(self) -> str:
        """Lineage and replay, if present."""
        parts = []
        if self.lineage is not None:
            lines = (clipped(line, _WIDTH) for line in self.lineage.lines())
            parts.append(
                "\n".join(["one rollout, from the version that sampled it to the one it helped to train:", *lines])
            )
        if self.replay is not None:
            from rollstream.pipeline.tools.replay import replay_text

            parts.append(f"the same log, replayed with another estimator:\n{replay_text(self.replay)}")
        return "\n\n".join(parts)

    def _places(self) -> str:
        lines = [f"{name}: {place}" for name, place in self.places.items()]
        lines += ["", "what to try next:", *(command_text(command, "    ") for command in self.next)]
        lines += ["", "PASSED" if self.passed else "FAILED: " + "; ".join(self.failures)]
        return "\n".join(lines)


def _standard_error(answers: int) -> float:
    """Upper bound of the standard error of a fraction estimated from this many answers."""
    return 0.5 / math.sqrt(answers)
