"""`rollstream show`: one rollout as a person reads it.

Turns, rewards, tokens with their log-probabilities and the advantage as colour, its group beside it, and its fate.
"""

import argparse
import math
from dataclasses import dataclass
from typing import Any

from consumers.grouping.changes import BATCHED
from pipeline.config import RunConfig
from pipeline.tables import printable, table
from pipeline.tools.lineage import Node, fate_node, place_of
from pipeline.tools.plain import compact, decoded, plain, tell, time_text
from pipeline.tools.view import Place, View
from topics.errors import TopicError
from topics.records import Rollout, TrainingBatch


@dataclass(frozen=True)
class Shown:
    """A rollout with what is known of it."""

    place: Place
    appended_ms: int
    rollout: Rollout
    advantage: float | None
    """None where it is in no batch."""
    group: list[tuple[str, float, float]]
    """uid, reward and advantage of the members batched with it."""
    fate: Node


def show(config: RunConfig, args: argparse.Namespace) -> int:
    """Print every rollout of a uid, or the one at a place."""
    with View(config.kafka, config.run) as view:
        places = [place_of(args.rollout)] if _is_place(args.rollout) else view.places_of(args.rollout)
        if not places:
            raise TopicError(
                f"no rollout of run {config.run} has uid {args.rollout!r}; `rollstream cat rollouts` lists them"
            )
        found = [_look(view, place) for place in places]
        if args.json:
            print(compact([_as_dict(shown, args.full) for shown in found]))
            tell(view.skipped)
            return 0
        # Imported late: a program that asks for JSON needs none of it.
        from rich.console import Console

        if args.color == "auto":
            console = Console(soft_wrap=True)
        else:
            console = Console(soft_wrap=True, color_system="truecolor", force_terminal=args.color == "always")
        for shown in found:
            _print(console, shown, args.full)
        tell(view.skipped)
        return 0


def _is_place(text: str) -> bool:
    partition, colon, offset = text.partition(":")
    return bool(colon) and partition.isdecimal() and offset.isdecimal()


def _look(view: View, place: Place) -> Shown:
    message = view.record("rollouts", *place)
    rollout = decoded(message.value())
    if not isinstance(rollout, Rollout):
        raise TopicError(f"rollouts[{place.partition}] holds no rollout at offset {place.offset}; try `rollstream cat`")
    fate = view.fates(place.partition, {place.offset})[place.offset]
    batch = view.batch_of(place, fate) if fate.name == BATCHED else None
    group, advantage = _group(batch, place) if batch is not None else ([], None)
    told = fate_node(view, place, fate, batch)
    return Shown(place, message.timestamp()[1], rollout, advantage, group, told)


def _group(batch: TrainingBatch, place: Place) -> tuple[list[tuple[str, float, float]], float]:
    row = batch.source_offsets.tolist().index(place.offset)
    advantages = batch.advantages[batch.splits[:-1]].tolist()
    members = [i for i, group in enumerate(batch.group_index.tolist()) if group == int(batch.group_index[row])]
    return [(batch.uids[i], float(batch.rewards[i]), advantages[i]) for i in members], advantages[row]


def _as_dict(shown: Shown, full: bool) -> dict[str, Any]:
    return {
        "offset": str(shown.place),
        "appended": time_text(shown.appended_ms),
        "rollout": plain(shown.rollout, full=full),
        "advantage": shown.advantage,
        "group": [{"uid": uid, "reward": reward, "advantage": a} for uid, reward, a in shown.group],
        "fate": shown.fate.as_dict(),
    }


def _print(console: Any, shown: Shown, full: bool) -> None:
    r = shown.rollout
    console.print(_text(f"rollout {r.uid}", "bold"))
    versions = f"version {r.policy_version}"
    if r.lowest_version != r.highest_version:
        versions += f" (tokens by {r.lowest_version} to {r.highest_version})"
    console.print(
        _text(f"{r.environment}/{r.example_id}, {versions}, rollouts {shown.place}, {time_text(shown.appended_ms)}")
    )
    parts = [f"{name} {value:g}" for name, value in r.reward_components.items()]
    told = f"reward {r.reward:g}" + (f" ({', '.join(parts)})" if parts else "")
    told += "" if shown.advantage is None else f", advantage {shown.advantage:+.4g}"
    console.print(_text(told + (", truncated" if r.truncated else "")))
    for turn in r.turns:
        console.print(_text(f"\n{turn.role}", "bold"), _text(turn.text), sep="\n")
    console.print(
        _text(f"\n{len(r.tokens)} tokens, {int(r.loss_mask.sum())} sampled: id, below it its log-probability", "bold")
    )
    console.print(_tokens(shown, None if full else 400))
    if shown.group:
        console.print(_text("\ngroup", "bold"))
        rows = [("> " + uid if uid == r.uid else "  " + uid, reward, a) for uid, reward, a in shown.group]
        console.print(_text(table(("  uid", "reward", "advantage"), rows)))
    console.print(_text("\n" + "\n".join(shown.fate.lines())))


def _text(text: str, style: str = "") -> Any:
    """A record's words, none of which a terminal obeys."""
    from rich.text import Text

    return Text(printable(text), style)


def _tokens(shown: Shown, most: int | None) -> Any:
    """Sampled tokens on green for a positive advantage and red for a negative one, the stronger the less likely."""
    from rich.text import Text

    r, text = shown.rollout, Text()
    count = len(r.tokens) if most is None else min(most, len(r.tokens))
    cells = 8
    for begin in range(0, count, cells):
        ids, below = Text(), Text()
        for i in range(begin, min(begin + cells, count)):
            sampled = bool(r.loss_mask[i])
            style = _style(shown.advantage, float(r.logprobs[i])) if sampled else "dim"
            ids.append(f"{int(r.tokens[i]):>8} ", style)
            below.append(f"{r.logprobs[i]:>8.3f} " if sampled else " " * 9, "dim")
        text.append(ids).append("\n").append(below).append("\n")
    if count < len(r.tokens):
        text.append(f"... {len(r.tokens) - count} tokens more; --full shows them")
    return text


def _style(advantage: float | None, logprob: float) -> str:
    surprise = 1.0 - math.exp(min(logprob, 0.0))
    strength = int(60 + 160 * surprise)
    if not advantage:
        return ""
    return f"on rgb(0,{strength},0)" if advantage > 0 else f"on rgb({strength},0,0)"
