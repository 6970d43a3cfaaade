"""`rollstream env check`: plays an environment, shows its turns and which tokens are trained on, and times it.

Replies come from the configured inference servers. If none was configured and the default does not answer, a server in
this process answers with random text; it renders chats as the run's servers do.
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rollstream.consumers.learner.pretrained import tokenizer_of
from rollstream.consumers.models.tokenizer import PRINTABLE_ASCII, Tokenizer
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.text_tables import printable, table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run.run_environments import NAME_HELP, environment_named
from rollstream.pipeline.tools.random_policy import random_server
from rollstream.producers.config import WorkerConfig
from rollstream.producers.environments.environment import SPLITS, AgentEnvironment, Episode, Prompt
from rollstream.producers.flow.policy_versions import NoPolicies
from rollstream.producers.inference.client import CompletionsClient
from rollstream.producers.inference.decoding import row_seed
from rollstream.producers.inference.errors import InferenceUnavailable
from rollstream.producers.record_sender import check_size, limit_bytes_of
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.producers.tasks.environment_loading import LoadedEnvironment
from rollstream.producers.worker.agent_player import play_agents
from rollstream.producers.worker.group_player import EpisodeLimits, play_group
from rollstream.producers.worker.local_gateway import LocalGateway
from rollstream.producers.worker.rollout_assembly import GroupStamp, rollout_of
from rollstream.producers.worker.sampling import GroupSampling, SamplingClient
from rollstream.topics.errors import RecordError
from rollstream.topics.records import Rollout
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.validation import untyped_problems

_WIDTH = 80
_LOOK_S = 2.0
SCHEDULING = Path("/proc/thread-self/schedstat")
"""Statistics of this thread: nanoseconds on a processor, nanoseconds waiting for one, time slices."""
_BLOCKED_S = 0.1
"""Time for which the event loop may be blocked without a warning."""


class ThreadTimes(NamedTuple):
    """The clock, and for how long this thread has run and has waited for a processor, all in seconds."""

    at_s: float
    ran_s: float
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class CheckedGroup:
    """One group that was played."""

    example_id: str
    rollouts: tuple[Rollout, ...]
    errors: tuple[str, ...]
    """Why members failed, for each member that did."""


@dataclass(frozen=True, kw_only=True)
class CheckTimes:
    """Times of all episodes together, in seconds."""

    episodes: int
    total_s: float
    inference_s: float
    """Time for which episodes waited for replies, summed over episodes, although these run in parallel."""
    blocked_s: float
    """Longest time for which the environment blocked everything else in the process."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream env check`."""
    set_handler(parser, run, example="rollstream env check my_game.py:MyGame", json=True)
    parser.add_argument("environment", metavar="NAME", help=NAME_HELP)
    parser.add_argument("--prompts", type=int, default=2, metavar="N", help="prompts to play (default: %(default)s)")
    parser.add_argument(
        "--members", type=int, default=4, metavar="N", help="episodes of each prompt (default: %(default)s)"
    )
    parser.add_argument("--random", action="store_true", help="use no server; replies are random text")


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Check an environment; return 0 if every episode can be trained on, else 1."""
    environment = environment_named(config, args.environment)
    tokenizer = tokenizer_of(config.learner)
    warnings = list(_prompt_problems(environment, tokenizer, config.inference.max_model_len))
    source, groups, times = asyncio.run(_check(config, environment, args))
    warnings += _group_problems(groups, times)
    if args.json:
        print(json.dumps(_as_dict(environment, source, groups, times, warnings)))
    else:
        print(_as_text(environment, tokenizer, source, groups, times, warnings))
    return 1 if any(group.errors for group in groups) else 0


async def _check(
    config: RunConfig, environment: LoadedEnvironment, args: argparse.Namespace
) -> tuple[str, list[CheckedGroup], CheckTimes]:
    """Play the groups one after another; return the source of the replies, the groups and the times."""
    prompts = environment.prompts("train")[: args.prompts]
    async with AsyncExitStack() as stack:
        worker = config.worker
        client = None if args.random else await _server(worker, stack)
        source = ", ".join(worker.inference_urls)
        if client is None:
            source = "random text, not a server's"
            alphabet = str(getattr(environment.environment, "vocabulary", "") or PRINTABLE_ASCII)
            server = await stack.enter_async_context(random_server(config, alphabet))
            # A request before the server has a version would be told to come back in a second.
            with suppress(TimeoutError):
                async with asyncio.timeout(worker.request_timeout_s):
                    while server.version < 0:
                        await asyncio.sleep(0.001)
            worker = replace(worker, inference_urls=(server.base_url,), engine="rollstream")
            client = await stack.enter_async_context(_client(worker, worker.request_timeout_s))
        if environment.agent is not None:
            # Assume a version, so that a model that reports no version can be checked, too.
            worker = replace(worker, assume_version=max(worker.assume_version, 0))
            gateway = LocalGateway(
                config.kafka,
                config.run,
                worker,
                config.gateway,
                name="check",
                policies=NoPolicies(),
                temperatures={environment.name: environment.temperature},
                recorded=False,
            )
            await stack.enter_async_context(gateway)
            play = partial(_agents_group, environment.agent, gateway)
        else:
            play = partial(_group, environment, client)
        blocking = asyncio.create_task(_longest_block())
        began = time.monotonic()
        groups = [
            await play(prompt, _stamp(environment, config.worker, args.members, number), config)
            for number, prompt in enumerate(prompts)
        ]
        total_s = time.monotonic() - began
        await asyncio.sleep(0)
        blocking.cancel()
        times = CheckTimes(
            episodes=args.members * len(prompts),
            total_s=total_s,
            inference_s=sum(
                turn.inference.inference_time_s
                for group in groups
                for rollout in group.rollouts
                for turn in rollout.turns
                if turn.inference is not None
            ),
            blocked_s=await blocking,
        )
    return source, groups, times


def _client(worker: WorkerConfig, timeout_s: float) -> CompletionsClient:
    return CompletionsClient(
        worker.inference_urls,
        model=worker.model,
        api_key=worker.api_key,
        timeout_s=timeout_s,
        engine=worker.engine,
    )


async def _server(worker: WorkerConfig, stack: AsyncExitStack) -> SamplingClient | None:
    """Return a client of the configured servers; None if they are the default servers and do not answer.

    Raises InferenceUnavailable if servers other than the default do not answer.
    """
    try:
        async with _client(worker, _LOOK_S) as look:
            await look.version()
    except InferenceUnavailable:
        if worker.inference_urls != WorkerConfig().inference_urls:
            raise
        return None
    return await stack.enter_async_context(_client(worker, worker.request_timeout_s))


async def _longest_block() -> float:
    """Measure until cancelled; return the longest time between two turns of the event loop, as `blocked_s` counts."""
    longest, before = 0.0, thread_times()
    try:
        while True:
            await asyncio.sleep(0.001)
            now = thread_times()
            longest, before = max(longest, blocked_s(before, now) - 0.001), now
    except asyncio.CancelledError:
        return max(longest, blocked_s(before, thread_times()) - 0.001)


def thread_times() -> ThreadTimes:
    """Return the times of this thread until now; where no statistics are kept, it never waits for a processor."""
    ran_ns, waited_ns = 0, 0
    with suppress(OSError, ValueError, IndexError):
        ran_ns, waited_ns = map(int, SCHEDULING.read_text().split()[:2])
    return ThreadTimes(time.monotonic(), max(ran_ns, 1) / 1e9, waited_ns / 1e9)


def blocked_s(before: ThreadTimes, now: ThreadTimes) -> float:
    """Return the time between two moments, in seconds, without the time for which other programs had the processors.

    A thread may sleep until another process has run, such as one that it starts. That process is assumed to wait for a
    processor as this thread did in all its life, for each second that it ran.
    """
    ran, waited = now.ran_s - before.ran_s, now.waited_s - before.waited_s
    slept = now.at_s - before.at_s - ran - waited
    return ran + slept * now.ran_s / (now.ran_s + now.waited_s)


def _stamp(environment: LoadedEnvironment, worker: WorkerConfig, members: int, number: int) -> GroupStamp:
    return GroupStamp(
        environment=environment.name,
        group_id=f"check-{number}",
        group_size=members,
        policy_version=0,
        temperature=environment.temperature,
        logprobs_mode=worker.logprobs_mode,
        worker_id="check",
    )


async def _group(
    environment: LoadedEnvironment, client: SamplingClient, prompt: Prompt, stamp: GroupStamp, config: RunConfig
) -> CheckedGroup:
    worker = config.worker
    sampling = GroupSampling(
        group_size=stamp.group_size,
        temperature=stamp.temperature,
        seed=row_seed(worker.seed, f"check.{prompt.example_id}") >> 1,
        assume_version=max(worker.assume_version, 0),
    )
    limits = EpisodeLimits(timeout_s=worker.episode_timeout_s, attempts=1)
    episodes = await play_group(environment, client, prompt, sampling, limits)
    rollouts, errors = [], []
    for number, episode in enumerate(episodes):
        if not isinstance(episode, Episode):
            errors.append(str(episode))
            continue
        try:
            rollout = rollout_of(episode, prompt, stamp, uid=f"{stamp.group_id}.{number}")
            _check_record(rollout, config)
        except RecordError as error:
            errors.append(str(error))
        else:
            rollouts.append(rollout)
    return CheckedGroup(example_id=prompt.example_id, rollouts=tuple(rollouts), errors=tuple(errors))


async def _agents_group(
    agent: AgentEnvironment, gateway: LocalGateway, prompt: Prompt, stamp: GroupStamp, config: RunConfig
) -> CheckedGroup:
    limits = EpisodeLimits(timeout_s=config.worker.episode_timeout_s, attempts=1)
    rollouts: list[Rollout] = []
    errors = []
    for episode in await play_agents(agent, gateway, prompt, stamp, limits):
        try:
            for rollout in episode.rollouts:
                _check_record(rollout, config)
        except RecordError as error:
            errors.append(str(error))
        else:
            rollouts += episode.rollouts
            errors += [] if episode.error is None else [str(episode.error)]
    return CheckedGroup(example_id=prompt.example_id, rollouts=tuple(rollouts), errors=tuple(errors))


def _check_record(rollout: Rollout, config: RunConfig) -> None:
    """Raise RecordError if a worker could not send a rollout, and would cancel its member instead."""
    if wrong := untyped_problems(rollout):
        raise RecordError(f"the rollout cannot be recorded: {'; '.join(wrong)}")
    size = len(encode_key(rollout.environment, rollout.example_id)) + len(encode(rollout))
    topic = topic_name(config.run, "rollouts")
    check_size(f"rollout {rollout.uid}", size, limit_bytes_of(config.kafka), topic, RolloutProducer.too_large)


def _prompt_problems(environment: LoadedEnvironment, tokenizer: Tokenizer, max_model_len: int) -> Iterator[str]:
    """Yield problems of an environment's prompts. Raises PromptRefused for a prompt that cannot be encoded."""
    by_name: dict[str, dict[str, Prompt]] = {}
    for split in SPLITS:
        prompts = environment.prompts(split)
        by_name[split] = {prompt.example_id: prompt for prompt in prompts}
        if [p.example_id for p in prompts] != [p.example_id for p in environment.prompts(split)]:
            yield f"prompts({split!r}) returns a different order each time; every process must see the same order"
        # The texts that an agent sends are not known here.
        lengths = [len(tokenizer.encode(prompt.text)) for prompt in prompts] if environment.agent is None else []
        if too_long := sum(length >= max_model_len for length in lengths):
            yield (
                f"{too_long} prompts of split {split} can never be answered: with {max(lengths)} tokens the longest "
                f"leaves no room for an answer in inference.max_model_len, {max_model_len}; shorten them, or raise the "
                "setting"
            )
    if not by_name["heldout"]:
        yield "prompts('heldout') is empty, so nothing can be evaluated; set evaluate = false in its entry"
    # Prompts are compared, not ids: two files may give different questions the same number.
    both = [name for name, prompt in by_name["heldout"].items() if by_name["train"].get(name) == prompt]
    if both:
        yield f"{len(both)} prompts are both trained on and held out, e.g. {min(both)}"


def _group_problems(groups: Sequence[CheckedGroup], times: CheckTimes) -> list[str]:
    warnings = []
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if rollouts and all(len({rollout.reward for rollout in group.rollouts}) < 2 for group in groups):
        warnings.append("all members of each group have the same reward: such groups teach nothing and are dropped")
    if rollouts and all(rollout.truncated for rollout in rollouts):
        warnings.append("every episode was cut off by a token limit; is max_tokens too low?")
    if times.blocked_s > _BLOCKED_S:
        warnings.append(
            f"the environment blocked everything else for {times.blocked_s:.1f} s, but a worker plays many episodes in "
            "one process: await slow work, or do it in another process"
        )
    return warnings


def _as_dict(
    environment: LoadedEnvironment,
    source: str,
    groups: Sequence[CheckedGroup],
    times: CheckTimes,
    warnings: Sequence[str],
) -> dict[str, object]:
    return {
        "environment": environment.name,
        "prompts": {split: len(environment.prompts(split)) for split in SPLITS},
        "replies": source,
        "warnings": list(warnings),
        "times": asdict(times),
        "groups": [
            {
                "example_id": group.example_id,
                "errors": list(group.errors),
                "members": [
                    {
                        "reward": rollout.reward,
                        "components": dict(rollout.reward_components),
                        "truncated": rollout.truncated,
                        "tokens": rollout.tokens.tolist(),
                        "loss_mask": rollout.loss_mask.astype(int).tolist(),
                        "turns": [
                            {"role": turn.role, "text": turn.text, "start": turn.start, "stop": turn.stop}
                            for turn in rollout.turns
                        ],
                    }
                    for rollout in group.rollouts
                ],
            }
            for group in groups
        ],
    }


def _as_text(
    environment: LoadedEnvironment,
    tokenizer: Tokenizer,
    source: str,
    groups: Sequence[CheckedGroup],
    times: CheckTimes,
    warnings: Sequence[str],
) -> str:
    train, heldout = (len(environment.prompts(split)) for split in SPLITS)
    lines = [
        f"environment {environment.name}: {train:,} prompts to train on, {heldout:,} held out, at most "
        f"{environment.max_tokens} tokens per reply",
        f"replies: {source}",
    ]
    for group in groups:
        lines += ["", f"prompt {printable(group.example_id)}"]
        if group.rollouts:
            first = group.rollouts[0]
            rows = [(t.role, f"{t.start}-{t.stop}", _quoted(t.text)) for t in first.turns]
            lines += [table(("turn", "tokens", "text of the first member"), rows)]
            lines += ["", "its tokens; ^ marks the tokens that are trained on", *masked_lines(first, tokenizer), ""]
            members = [
                (
                    rollout.uid.partition(".")[2],
                    float(f"{rollout.reward:.4g}"),
                    len(rollout.tokens),
                    int(rollout.loss_mask.sum()),
                    "truncated" if rollout.truncated else "ended",
                    " ".join(f"{name}={value:g}" for name, value in sorted(rollout.reward_components.items())),
                )
                for rollout in group.rollouts
            ]
            lines.append(table(("member", "reward", "tokens", "trained", "end", "components"), members))
        failures = Counter(printable(error) for error in group.errors)
        lines += [f"{count} failed: {error}" for error, count in failures.items()]
    each_ms = 1000 * times.total_s / max(times.episodes, 1)
    lines += [
        "",
        f"{times.episodes} episodes in {times.total_s:.2f} s, {each_ms:.1f} ms each; each waited "
        f"{1000 * times.inference_s / max(times.episodes, 1):.1f} ms for replies",
        *(f"warning: {warning}" for warning in warnings),
    ]
    return "\n".join(lines)


def masked_lines(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """Return the tokens of a rollout on lines of a terminal's width, each with a line of marks below it."""
    lines: list[str] = []
    shown, marks = "", ""
    for token, trained in zip(rollout.tokens.tolist(), rollout.loss_mask.tolist(), strict=True):
        text = tokenizer.decode([token])
        cell = printable(text, keep="").replace("\\u000a", "\\n") if text else "<end>"
        if len(shown) + len(cell) > _WIDTH - 4:
            lines += [f"  {shown}", f"  {marks}"]
            shown, marks = "", ""
        shown += cell
        marks += ("^" if trained else " ") * len(cell)
    return [line.rstrip() for line in [*lines, f"  {shown}", f"  {marks}"]]


def _quoted(text: str) -> str:
    quoted = printable(text, keep="").replace("\\u000a", "\\n")
    return quoted if len(quoted) <= _WIDTH - 20 else f"{quoted[: _WIDTH - 23]}..."
