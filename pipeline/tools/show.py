"""`rollstream show`: prints one rollout for people.

Shows turns, rewards, the group, the fate, and tokens with their texts and log-probabilities; the advantage is shown as
colour.
"""

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import array_text, compact, decoded, plain, tell, time_text
from rollstream.pipeline.command_line.text_tables import printable, table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.indexed_run import IndexedRun, RolloutPlace, indexed_run
from rollstream.pipeline.index.lineage import LineageNode, fate_node, parse_place, rollout_places
from rollstream.producers.inference.replay_arrays import is_known
from rollstream.topics.errors import RecordError, TopicError
from rollstream.topics.files.stored_arrays import StoredArrays
from rollstream.topics.records import Rollout, TrainingBatch
from rollstream.topics.wire.media import is_medium, media_of
from rollstream.topics.wire.rl_examples import ROUTED_EXPERTS, SAMPLING_MASK

_CELLS = 8
"""Tokens in a row of the table."""
_BEFORE = 12
"""Characters shown before an unlikely token."""
_HALF_CONTEXT = 600
"""Characters shown at the beginning and at the end of a long text that was not sampled."""


@dataclass(frozen=True)
class RolloutDetails:
    """A rollout with its advantage, group and fate."""

    place: RolloutPlace
    appended_ms: int
    rollout: Rollout
    advantage: float | None
    """None if the rollout is not in a batch."""
    group: list[tuple[str, float, float]]
    """Uid, reward and advantage of each member of the rollout's group in its batch."""
    fate: LineageNode


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream show`."""
    set_handler(parser, show, example="rollstream show --run main 0:1234", json=True)
    parser.add_argument("rollout", metavar="ROLLOUT", help="uid of the rollout, or PARTITION:OFFSET")
    parser.add_argument("--full", action="store_true", help="all tokens; with --json, arrays in full")
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="show the advantage as colour (default: %(default)s)",
    )


def show(config: RunConfig, args: argparse.Namespace) -> int:
    """Print every rollout with a uid, or the rollout at an offset."""
    with indexed_run(config) as view:
        name = args.rollout
        places = [parse_place(name)] if re.fullmatch(r"\d+:\d+", name, re.ASCII) else rollout_places(view, name)
        rollouts = [_details(view, place) for place in places]
        if args.json and args.full:
            rollouts = [replace(details, rollout=_with_arrays(config, details.rollout)) for details in rollouts]
        if args.json:
            print(compact([_as_dict(details, args.full) for details in rollouts]))
            tell(view.skipped)
            return 0
        # Imported late, because JSON output does not need it.
        from rich.console import Console

        if args.color == "auto":
            console = Console(soft_wrap=True)
        else:
            console = Console(soft_wrap=True, color_system="truecolor", force_terminal=args.color == "always")
        for details in rollouts:
            _print(console, details, args.full, view.token_texts(details.rollout.tokens.tolist()) or ())
        tell(view.skipped)
        return 0


def _details(view: IndexedRun, place: RolloutPlace) -> RolloutDetails:
    message = view.record("rollouts", *place)
    rollout = decoded(message.value)
    if not isinstance(rollout, Rollout):
        raise TopicError(f"rollouts[{place.partition}] has no rollout at offset {place.offset}; try `rollstream cat`")
    fate = view.fate(place)
    batch = view.batch_of(place, fate)
    group, advantage = batch_group(batch, place) if batch is not None else ([], None)
    return RolloutDetails(place, message.timestamp_ms, rollout, advantage, group, fate_node(view, place, fate, batch))


def _with_arrays(config: RunConfig, rollout: Rollout) -> Rollout:
    """Return a rollout with its stored arrays. Raises ArrayMissing, StoreError or ConfigurationError."""
    arrays = rollout.token_arrays
    if not any(array.stored for array in arrays.values()):
        return rollout
    store = StoredArrays.of(config.run, config.kafka.arrays)
    return replace(rollout, token_arrays={name: store.load(array) for name, array in arrays.items()})


def batch_group(batch: TrainingBatch, place: RolloutPlace) -> tuple[list[tuple[str, float, float]], float]:
    """Return uid, reward and advantage of a rollout's group members in its batch, and the rollout's advantage."""
    row = batch.source_offsets.tolist().index(place.offset)
    advantages = batch.advantages[batch.splits[:-1]].tolist()
    members = [i for i, group in enumerate(batch.group_index.tolist()) if group == int(batch.group_index[row])]
    return [(batch.uids[i], float(batch.rewards[i]), advantages[i]) for i in members], advantages[row]


def _as_dict(details: RolloutDetails, full: bool) -> dict[str, Any]:
    return {
        "offset": str(details.place),
        "appended": time_text(details.appended_ms),
        "rollout": plain(details.rollout, full=full),
        "advantage": details.advantage,
        "group": [{"uid": uid, "reward": reward, "advantage": a} for uid, reward, a in details.group],
        "fate": details.fate.as_dict(),
    }


def _print(console: Any, details: RolloutDetails, full: bool, texts: Sequence[str]) -> None:
    r = details.rollout
    console.print(_text(f"rollout {r.uid}", "bold"))
    versions = f"version {r.policy_version}"
    if r.lowest_version != r.highest_version:
        versions += f" (tokens by {r.lowest_version} to {r.highest_version})"
    console.print(
        _text(f"{r.environment}/{r.example_id}, {versions}, rollouts {details.place}, {time_text(details.appended_ms)}")
    )
    parts = [f"{name} {value:g}" for name, value in r.reward_components.items()]
    reward = f"reward {r.reward:g}" + (f" ({', '.join(parts)})" if parts else "")
    reward += "" if details.advantage is None else f", advantage {details.advantage:+.4g}"
    console.print(_text(reward + (", truncated" if r.truncated else "")))
    for turn in r.turns:
        console.print(_text(f"\n{turn.role}", "bold"), _text(turn.text), sep="\n")
    if media := media_of(r.token_arrays):
        console.print(_text("\n".join(("", *map(str, media)))))
    for name, array in sorted(r.token_arrays.items()):
        if not is_medium(name):
            console.print(_text(f"array {name}: {array_text(array)}"))
    columns = "id, its text" if texts else "id"
    sampled = f"{len(r.tokens)} tokens, {int(r.loss_mask.sum())} sampled"
    console.print(_text(f"\n{sampled}: each {columns} and its log-probability", "bold"))
    for line in _replay_lines(r):
        console.print(_text(line))
    console.print(tokens_table(r, details.advantage, None if full else 400, texts))
    if texts and (unlikely := unlikely_tokens(r, texts)):
        console.print(_text(unlikely))
    if details.group:
        console.print(_text("\ngroup", "bold"))
        rows = [("> " + uid if uid == r.uid else "  " + uid, reward, a) for uid, reward, a in details.group]
        console.print(_text(table(("  uid", "reward", "advantage"), rows)))
    console.print(_text("\n" + "\n".join(details.fate.lines())))


def _replay_lines(r: Rollout) -> list[str]:
    """Return a line for the experts and one for the sampling mask, if the rollout has them."""
    lines = []
    if (named := r.token_arrays.get(ROUTED_EXPERTS)) is not None and not named.stored:
        try:
            experts = named.array()
            known = int(is_known(experts).sum())
            each = " x ".join(map(str, experts.shape[1:]))
            lines.append(f"{ROUTED_EXPERTS}: {each} of {known} tokens, {experts.dtype}, {len(named.data)} bytes")
        except (RecordError, ValueError) as error:
            lines.append(f"{ROUTED_EXPERTS}: unreadable ({error})")
    if (named := r.token_arrays.get(SAMPLING_MASK)) is not None:
        each = f"{named.shape[0] / max(int(r.loss_mask.sum()), 1):.1f}"
        lines.append(f"{SAMPLING_MASK}: {each} tokens kept for each sampled token, {4 * named.shape[0]} bytes")
    return lines


def _text(text: str, style: str = "") -> Any:
    """Return text of a record without control characters."""
    from rich.text import Text

    return Text(printable(text), style)


def _visible(text: str) -> str:
    """Return the text of a token with visible spaces, tabs and line ends."""
    return printable(text.translate({ord(" "): "·", ord("\n"): "⏎", ord("\t"): "⇥"}), keep="")


def unlikely_tokens(r: Rollout, texts: Sequence[str], most: int = 8) -> str:
    """Return a line with the sampled tokens of the lowest probabilities, at most 1 in 2, each with its position and the
    text before it."""
    sampled = [(_logprob(r, i), i) for i in range(min(len(r.tokens), len(r.logprobs))) if _is_sampled(r, i)]
    least = sorted(each for each in sampled if each[0] <= math.log(0.5))[:most]
    shown = [
        f"{_visible(''.join(texts[max(0, i - _BEFORE) : i])[-_BEFORE:])}[{_visible(texts[i])}] at {i} "
        f"({math.exp(logprob):.2%})"
        for logprob, i in least
    ]
    return f"least likely: {', '.join(shown)}" if shown else ""


def tokens_table(r: Rollout, advantage: float | None, most: int | None, texts: Sequence[str] = ()) -> Any:
    """Return a table of the first `most` tokens, or of all, with their `texts` if there are any.

    Unless all are asked for, texts that were not sampled, such as prompts, are shown as texts. Sampled tokens have a
    green background for a positive advantage and a red one for a negative advantage, stronger for unlikely tokens.
    """
    from rich.text import Text

    text = Text()
    left = len(r.tokens) if most is None else most
    for as_text, places in _stretches(r, bool(texts) and most is not None):
        if as_text:
            shown = _visible("".join(texts[i] for i in places))
            if len(shown) > 2 * _HALF_CONTEXT:
                shown = f"{shown[:_HALF_CONTEXT]} ... {shown[-_HALF_CONTEXT:]}"
            text.append(f"{places[0]} to {places[-1]}, not sampled: {shown}\n", "dim")
            continue
        for begin in range(0, min(len(places), left), _CELLS):
            ids, middle, below = Text(), Text(), Text()
            for i in places[begin : min(begin + _CELLS, left)]:
                sampled, logprob = _is_sampled(r, i), _logprob(r, i)
                ids.append(f"{int(r.tokens[i]):>8} ", _style(advantage, logprob) if sampled else "dim")
                if texts:
                    middle.append(f"{_visible(texts[i])[:8]:>8} ")
                below.append(f"{logprob:>8.3f} " if sampled else " " * 9, "dim")
            for line in (ids, *([middle] if texts else []), below):
                text.append(line).append("\n")
        if len(places) > left:
            text.append(f"... {len(r.tokens) - places[left]} more tokens; --full shows them")
            break
        left -= len(places)
    return text


def _stretches(r: Rollout, texts_as_such: bool) -> list[tuple[bool, list[int]]]:
    """Return the positions of all tokens in order, in stretches that are shown as texts or in a table."""
    stretches: list[tuple[bool, list[int]]] = []
    for sampled, run in groupby(range(len(r.tokens)), lambda i: _is_sampled(r, i)):
        places = list(run)
        as_text = texts_as_such and not sampled and len(places) > _CELLS
        if stretches and not as_text and not stretches[-1][0]:
            stretches[-1][1].extend(places)
        else:
            stretches.append((as_text, places))
    return stretches


# Arrays of a rollout that is shown because it is invalid may be shorter than its tokens.
def _is_sampled(r: Rollout, i: int) -> bool:
    return i < len(r.loss_mask) and bool(r.loss_mask[i])


def _logprob(r: Rollout, i: int) -> float:
    return float(r.logprobs[i]) if i < len(r.logprobs) else math.nan


def _style(advantage: float | None, logprob: float) -> str:
    if not advantage or math.isnan(advantage):
        return ""
    surprise = 0.0 if math.isnan(logprob) else 1.0 - math.exp(min(logprob, 0.0))
    strength = int(60 + 160 * surprise)
    return f"on rgb(0,{strength},0)" if advantage > 0 else f"on rgb({strength},0,0)"
