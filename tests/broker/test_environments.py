"""Failures of users' environments and of their prompts: members are tried again or cancelled, and no worker ends."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp

from rollstream.pipeline.audit.ledger import ledger
from rollstream.producers.config import EnvironmentConfig, WorkerConfig
from rollstream.producers.environments.environment import Endpoint, Episode, Generate, Message, Prompt, Reply, Score
from rollstream.producers.gateway.sessions import episode_of
from rollstream.producers.tasks.environment_loading import LoadedEnvironment, with_settings
from rollstream.producers.worker.worker import WorkerReport
from rollstream.producers.worker.worker_process import run_worker
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import GroupCancelled, Rollout, SessionEvent
from rollstream.topics.wire.validation import problems
from tests.support.producing import TOKENIZER, SortingGenerator, serving
from tests.support.runs import RealRun


class Sorts:
    """One turn with a reward of 1; subclasses fail in their own ways."""

    name = "sorts"
    max_tokens = 8

    def __init__(self) -> None:
        self.played = 0

    def prompts(self, _split: str) -> Sequence[Prompt]:
        return [Prompt(example_id=str(n), text=f"{n}>") for n in range(40, 60)]

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        self.played += 1
        reply = await generate(prompt.text)
        return Episode(turns=(Message(role="user", text=prompt.text), reply), score=Score(reward=1.0))


class HangsOnce(Sorts):
    """The first episode never ends."""

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        if self.played == 0:
            self.played += 1
            await asyncio.Event().wait()
        return await super().run(prompt, generate)


class FailsOnce(Sorts):
    """The first verdict fails, and the later ones succeed."""

    failed = False

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        episode = await super().run(prompt, generate)
        if not self.failed:
            self.failed = True
            raise OSError("the judge is away")
        return episode


class Fails(Sorts):
    """Every verdict fails."""

    name = "fails"

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        await super().run(prompt, generate)
        raise ZeroDivisionError("no verdict")


class Talks(Sorts):
    """Asks again until a reply is truncated."""

    name = "talks"

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        turns: list[Message | Reply] = []
        text = prompt.text
        while not turns or not turns[-1].truncated:  # type: ignore[union-attr]
            reply = await generate(text)
            turns += [Message(role="user", text=text), reply]
            text = "31>"
        return Episode(turns=tuple(turns), score=Score(reward=0.25))


class Long(Sorts):
    """The prompt is longer than the model's context."""

    name = "long"

    def prompts(self, _split: str) -> Sequence[Prompt]:
        return [Prompt(example_id="long", text="1" * 40 + ">")]


class Strange(Sorts):
    """The prompt holds a character that the tokenizer does not know."""

    name = "strange"

    def prompts(self, _split: str) -> Sequence[Prompt]:
        return [Prompt(example_id="strange", text="é>")]


class SortsTwice:
    """An agent: it sorts its number, then another one in a context of its own. It fails at one of its prompts."""

    name = "agent"
    max_tokens = 8

    def prompts(self, _split: str) -> Sequence[Prompt]:
        return [Prompt(example_id=text, text=f"{text}>") for text in ("21", "43", "broken")]

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        first = await completed("21>" if prompt.example_id == "broken" else prompt.text, endpoint)
        if prompt.example_id == "broken":
            raise RuntimeError("the agent broke")
        await completed("987>", endpoint)
        return Score(reward=float(first == "".join(sorted(prompt.example_id))))


async def completed(text: str, endpoint: Endpoint) -> str:
    """Return the policy's completion of a text."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    body = {"model": endpoint.model, "prompt": text, "max_tokens": 8}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{endpoint.base_url}/completions", json=body) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return str(answer["choices"][0]["text"])


def play(kafka: KafkaConfig, run_name: str, *environments: Any, **change: Any) -> WorkerReport:
    async def work(base_url: str) -> WorkerReport:
        config = WorkerConfig(
            **{"worker_id": "w", "inference_urls": (base_url,), "group_size": 4, "request_timeout_s": 20.0, **change}
        )
        loaded: list[LoadedEnvironment] = [
            with_settings(environment, config, EnvironmentConfig(use="tests:Sorts")) for environment in environments
        ]
        return await run_worker(loaded, kafka, run_name, config, incarnation="1", stop=asyncio.Event())

    with serving(SortingGenerator()) as server:
        return asyncio.run(work(server.base_url))


def records(kafka: KafkaConfig, run_name: str, tmp_path: Any) -> tuple[list[Rollout], list[GroupCancelled]]:
    read_back = RealRun(kafka, run_name, tmp_path).read("rollouts")
    rollouts = [record for record in read_back if isinstance(record, Rollout)]
    assert [problems(rollout) for rollout in rollouts] == [[]] * len(rollouts)
    return rollouts, [record for record in read_back if isinstance(record, GroupCancelled)]


def test_an_agent_calls_the_policy_itself_and_each_of_its_branches_is_a_rollout(
    kafka: KafkaConfig, run_name: str, tmp_path: Any
) -> None:
    report = play(kafka, run_name, SortsTwice(), groups=3)
    rollouts, cancelled = records(kafka, run_name, tmp_path)
    # Three groups of four: two of whole episodes with two branches each, and one of broken ones.
    assert len(rollouts) == 2 * 4 * 2
    assert {record.example_id for record in cancelled} == {"broken"}
    assert "RuntimeError('the agent broke') at " in cancelled[0].reason
    episodes: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        episodes.setdefault(rollout.episode_uid, []).append(rollout)
    for members in episodes.values():
        assert sorted(rollout.branch for rollout in members) == [0, 1]
        assert {rollout.branches for rollout in members} == {2}
        for rollout in members:
            end = rollout.tokens[rollout.loss_mask].tolist()[-1]
            assert end == TOKENIZER.eos_id
            assert rollout.response_logprobs[0] == -0.125
    events = [event for event in RealRun(kafka, run_name, tmp_path).read("calls") if isinstance(event, SessionEvent)]
    finished = {episode_of(event.session): set(event.uids) for event in events if event.kind == "finished"}
    assert {name: uids for name, uids in finished.items() if uids} == {
        name: {rollout.uid for rollout in members} for name, members in episodes.items()
    }
    assert len(finished) == 12
    assert report.cancelled == 4


def test_an_episode_that_hangs_is_cancelled_after_its_time_and_its_group_is_kept(
    kafka: KafkaConfig, run_name: str, tmp_path: Any
) -> None:
    report = play(kafka, run_name, HangsOnce(), groups=2, episode_timeout_s=4.0)
    rollouts, [cancelled] = records(kafka, run_name, tmp_path)
    assert (len(rollouts), len(cancelled.uids), report.cancelled) == (7, 1, 1)
    assert "took longer than worker.episode_timeout_s 4" in cancelled.reason


def test_an_episode_whose_verifier_fails_is_tried_again(kafka: KafkaConfig, run_name: str, tmp_path: Any) -> None:
    environment = FailsOnce()
    report = play(kafka, run_name, environment, groups=1)
    rollouts, cancelled = records(kafka, run_name, tmp_path)
    assert (len(rollouts), cancelled, environment.played) == (4, [], 5)
    assert report.reward == 1.0


def test_an_environment_that_always_fails_is_cancelled_paused_and_others_go_on(
    kafka: KafkaConfig, run_name: str, tmp_path: Any
) -> None:
    fails = Fails()
    report = play(kafka, run_name, Sorts(), fails, groups=40, episode_attempts=3)
    rollouts, cancelled = records(kafka, run_name, tmp_path)
    assert {rollout.environment for rollout in rollouts} == {"sorts"}
    assert {record.environment for record in cancelled} == {"fails"}
    assert fails.played == 3 * report.cancelled, "three attempts for each member"
    assert "ZeroDivisionError('no verdict') at " in cancelled[0].reason
    assert "test_environments.py" in cancelled[0].reason
    # Without pauses half of the groups would have failed.
    assert report.cancelled < 4 * 20
    assert report.rollouts + report.cancelled == 4 * 40


def test_a_context_that_is_full_ends_the_episode_truncated_with_its_reward(
    kafka: KafkaConfig, run_name: str, tmp_path: Any
) -> None:
    play(kafka, run_name, Talks(), groups=1)
    rollouts, cancelled = records(kafka, run_name, tmp_path)
    assert (len(rollouts), cancelled) == (4, [])
    for rollout in rollouts:
        assert (rollout.truncated, rollout.reward) == (True, 0.25)
        assert len(rollout.tokens) <= SortingGenerator.max_model_len
        replies = [turn for turn in rollout.turns if turn.role == "assistant"]
        assert len(replies) > 1
        assert replies[-1].start < replies[-1].stop


def test_prompts_that_a_server_refuses_are_cancelled_and_the_worker_goes_on(
    kafka: KafkaConfig, run_name: str, tmp_path: Any
) -> None:
    # The first group is sent, which shows that the settings are right.
    report = play(kafka, run_name, Sorts(), Long(), Strange(), groups=6, concurrency=1)
    rollouts, cancelled = records(kafka, run_name, tmp_path)
    assert {rollout.environment for rollout in rollouts} == {"sorts"}
    assert {record.environment for record in cancelled} == {"long", "strange"}
    assert all("this server accepts 1 to" in record.reason for record in cancelled if record.environment == "long")
    assert report.rollouts + report.cancelled == 4 * 6


# ---------------------------------------------------------------------- agents that fail


class Judged:
    """An agent whose judge is away for the first attempts at each member."""

    name = "judged"
    max_tokens = 8
    away = 2

    def __init__(self) -> None:
        self.answers: dict[str, list[str]] = {}
        """Answers to the members' attempts, in order."""

    def prompts(self, _split: str) -> Sequence[Prompt]:
        return [Prompt(example_id=str(n), text=f"{n}>") for n in range(50, 60)]

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        answer = await completed(prompt.text, endpoint)
        member = endpoint.base_url.removesuffix("/v1").rpartition("/")[2].partition("-")[0]
        attempts = self.answers.setdefault(member, [])
        attempts.append(answer)
        if len(attempts) <= self.away:
            raise OSError("the judge is away")
        return Score(reward=float(answer == prompt.example_id))


def test_an_agent_that_fails_is_tried_again_with_the_answers_it_had_and_its_group_is_whole(
    kafka: KafkaConfig, run_name: str, tmp_path: Any
) -> None:
    environment = Judged()
    report = play(kafka, run_name, environment, groups=6, episode_attempts=3)
    rollouts, cancelled = records(kafka, run_name, tmp_path)
    assert (report.cancelled, cancelled) == (0, [])
    assert sorted(rollout.uid for rollout in rollouts) == sorted(environment.answers), "one rollout of each member"
    assert {rollout.group_size for rollout in rollouts} == {4}
    assert {len(attempts) for attempts in environment.answers.values()} == {3}
    for attempts in environment.answers.values():
        assert len(set(attempts)) == 1, "a failure does not choose among answers"
    assert len({rollout.reward for rollout in rollouts}) == 2, "members are sampled with seeds of their own"
    book = ledger(kafka, run_name)
    assert book.problems == []
    fates = ("recorded", "in_rollouts", "cancelled", "open", "sessions", "open_sessions")
    assert [book.calls[fate] for fate in fates] == [72, 24, 48, 0, 72, 0]
    assert all(reason.startswith("tried again: environment judged failed on ") for reason in book.calls["reasons"])


def test_an_agent_that_always_fails_is_cancelled_after_its_last_attempt(
    kafka: KafkaConfig, run_name: str, tmp_path: Any
) -> None:
    environment = Judged()
    report = play(kafka, run_name, environment, groups=1)
    rollouts, cancelled = records(kafka, run_name, tmp_path)
    assert (rollouts, report.cancelled) == ([], 4)
    assert {len(attempts) for attempts in environment.answers.values()} == {2}
    assert sorted(uid for record in cancelled for uid in record.uids) == sorted(environment.answers)
    assert all("OSError('the judge is away') at " in record.reason for record in cancelled)
    assert ledger(kafka, run_name).calls["cancelled"] == 8
