"""The role `collect`: one process that plays a control task. To scale, start more processes with the next ordinals."""

import argparse
import os
import signal
import threading
import time

from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.process_number import add_number
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process.role_process import TERMINATED, announce_ready, stop_on_signals
from rollstream.pipeline.run.broker_wait import wait_for_broker
from rollstream.producers.trajectories.collecting import Player, run_collecting
from rollstream.topics.control.steering import SteeringFollower
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.user_code import load_object

_LOOK_S = 1.0


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream role collect`."""
    example = "rollstream role collect --run robot --set collect.player=cell.arm:play"
    set_handler(parser, run, example=example, role=True)
    add_number(parser, "process")


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Collect until the player has returned and its trajectories are sent, or until stopped. The exit code is
    TERMINATED if it was stopped before, unless the run is being drained."""
    player, stop = player_of(config.collect.player), stop_on_signals()
    wait_for_broker(config)
    with SteeringFollower(config.kafka, config.run) as following:
        threading.Thread(target=_end_when_draining, args=(following,), name="control", daemon=True).start()
        done = run_collecting(
            player,
            config.kafka,
            config.run,
            config.collect,
            ordinal=args.ordinal,
            stop=stop,
            on_ready=announce_ready,
        )
        return 0 if done or following.state.draining else TERMINATED


def _end_when_draining(following: SteeringFollower) -> None:
    """Stop this process as SIGTERM does, once the run is being drained."""
    while not following.state.draining:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)


def player_of(name: str) -> Player:
    """Import the player that a setting names. Raises ConfigurationError if it is invalid or cannot be imported."""
    form = "a player is named package.module:function"
    player = load_object(name, "collect.player is", form)
    if not callable(player):
        raise ConfigurationError(f"collect.player is {name!r}, a {type(player).__name__}; {form}")
    return player  # type: ignore[no-any-return]
