"""The role `collect`: one process that plays a control task; scaling is starting more under further ordinals."""

import argparse

from consumers.importing import imported
from pipeline.config import RunConfig
from pipeline.process import announce_ready, stop_on_signals
from producers.trajectories.collecting import Player, run_collecting
from topics.errors import ConfigurationError


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Collect until the player returns, its trajectories are sent, or told to stop."""
    run_collecting(
        player_of(config.collect.player),
        config.kafka,
        config.run,
        config.collect,
        ordinal=args.ordinal,
        stop=stop_on_signals(),
        on_ready=announce_ready,
    )
    return 0


def player_of(name: str) -> Player:
    """The player that a setting names. Raises ConfigurationError where it is none or cannot be imported."""
    form = "a player is named package.module:function"
    player = imported(name, "collect.player is", form)
    if not callable(player):
        raise ConfigurationError(f"collect.player is {name!r}, a {type(player).__name__}; {form}")
    return player  # type: ignore[no-any-return]
