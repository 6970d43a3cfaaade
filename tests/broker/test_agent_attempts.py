"""An agent that fails is tried again with the answers that it had, and cancelled after its last attempt."""

from collections.abc import Sequence
from typing import Any

from rollstream.pipeline.audit.ledger import ledger
from rollstream.producers.environments.environment import Endpoint, Prompt, Score
from rollstream.topics.config import KafkaConfig
from tests.broker.test_environments import completed, play, records


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
