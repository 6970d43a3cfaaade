"""Faults of a run's containers, made by the real engine and judged by the auditor, which shares no code with it."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rollstream.infra.broker.ports import free_port
from tests.containers.compose_run import SMALLER, ContainedRun, contained_run
from tests.containers.container_faults import FAULTS, full, small_disk
from tests.containers.outside_agent import OutsideAgent
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]
ROLES = ("broker", "group-0", "learn", "infer", "gateway")
LONGEST_S = 12.0
"""Longest fault: twice a session of grouping, less than a transaction may last."""
SEED = 30
WITHOUT_END = (
    *("--set=supervisor.workers=0", "--set=learner.max_steps=1000000", "--set=worker.group_size=4"),
    *("--set=grouping.batch_rollouts=8", "--set=learner.rollouts_per_step=16"),
)


@contextmanager
def played(
    folder: Path, name: str, *flags: str, override: dict[str, object] | None = None
) -> Iterator[tuple[ContainedRun, OutsideAgent]]:
    """A run without an end, whose rollouts come from an agent outside."""
    port = free_port("127.0.0.1")
    settings = (*SMALLER, *WITHOUT_END, f"--set=gateway.port={port}", *flags)
    with contained_run(folder, name, *settings, override=override) as run:
        with OutsideAgent(f"http://127.0.0.1:{port}", SEED) as agent:
            await_work(run, agent, "before any fault")
            yield run, agent
        print(f"{len(agent.finished)} rollouts of the agent were acknowledged, it gave up {agent.given_up} sessions")
        assert_promises(run, agent)


def await_work(run: ContainedRun, agent: OutsideAgent, what: str) -> None:
    """Everything takes part: the agent gets rollouts on record, and the learner makes further steps."""
    before = len(agent.finished)
    eventually(lambda: len(agent.finished) >= before + 8, 600, f"{what}: 8 rollouts of the agent", every_s=1.0)
    run.await_steps(2, what)


def assert_promises(run: ContainedRun, agent: OutsideAgent) -> None:
    """Rollouts that were acknowledged are on record; the books close, batches refold, the auditor finds nothing."""
    run.await_all()
    run.stop("gateway")
    run.stop(*(name for name in run.roles if name != "gateway"))
    run.tool("ledger")
    run.tool("verify")
    evidence = run.evidence()
    print({name: evidence[name] for name in ("findings", "not_modelled", "batches", "places")})
    assert evidence["findings"] == []
    assert {uid: evidence["rewards"].get(uid) for uid in agent.finished} == agent.finished
    run.stop(*run.brokers)


def test_faults_of_every_container_lose_and_repeat_nothing(local_images: str, run_name: str, tmp_path: Path) -> None:
    """In each round all roles have different faults at once; over the rounds each role has each fault."""
    rng = random.Random(SEED)
    kinds, roles = rng.sample(sorted(FAULTS), len(FAULTS)), rng.sample(ROLES, len(ROLES))
    with played(tmp_path, run_name, f"--kafka-image={local_images}") as (run, agent):
        for number in range(len(kinds)):
            faults = [(kinds[(number + place) % len(kinds)], role) for place, role in enumerate(roles)]
            rng.shuffle(faults)
            length_s = rng.uniform(LONGEST_S / 3, LONGEST_S)
            print(f"seed {SEED}, round {number}, {length_s:.1f} s: {faults}")
            with ExitStack() as lasting:
                for kind, role in faults:
                    lasting.enter_context(FAULTS[kind](run, role))
                # How long it lasts is part of a fault.
                time.sleep(length_s)
            await_work(run, agent, f"after round {number}")


def small_volume(stack: ExitStack, folder: Path) -> tuple[Path, dict[str, object]]:
    """A disk of 256 MiB, and the volume of a compose file that is on it."""
    folder.mkdir()
    disk = stack.enter_context(small_disk(folder, 256))
    return disk, {"driver": "local", "driver_opts": {"type": "none", "o": "bind", "device": str(disk)}}


def test_a_broker_and_a_learner_whose_disks_were_full_go_on_once_there_is_room(
    local_images: str, run_name: str, tmp_path: Path
) -> None:
    """All roles share the second volume; it holds the learner's checkpoints and the archive."""
    with ExitStack() as stack:
        of_broker, broker_volume = small_volume(stack, tmp_path / "broker")
        of_run, run_volume = small_volume(stack, tmp_path / "run")
        volumes = {"volumes": {"broker": broker_volume, "run": run_volume}}
        run, agent = stack.enter_context(
            played(
                tmp_path,
                run_name,
                f"--kafka-image={local_images}",
                "--set=learner.checkpoint.every_steps=2",
                override=volumes,
            )
        )
        for disk, role, reason in (
            (of_broker, "broker", "No space left on device"),
            (of_run, "learn", "rollstream: no checkpoint could be written to"),
        ):
            before = run.inspect(role)["RestartCount"]
            with full(disk):
                eventually(
                    lambda role=role, before=before: run.inspect(role)["RestartCount"] >= before + 2,
                    600,
                    f"{role} to give up twice",
                    every_s=1.0,
                )
                assert reason in run.log(role)
            await_work(run, agent, f"with room again for {role}")
