"""A curriculum in a worker's process: it follows what the policy learns, and goes on where a killed worker stopped."""

import subprocess
from collections import Counter
from collections.abc import Callable

import pytest

from rollstream.producers.flow.mixture import PromptOrder
from rollstream.topics.records import MixtureState, Rollout
from tests.support.producing import SortingGenerator, serving
from tests.support.runs import RealRun
from tests.support.waiting import eventually

SORTS = '''
import asyncio

from rollstream import Episode, Message, Prompt, Score


class Sorts:
    """Numbers whose digits are to be sorted."""

    max_tokens = 8

    def __init__(self, name, lowest):
        self.name = name
        self.lowest = lowest

    def prompts(self, split):
        return [Prompt(example_id=str(n), text=f"{n}>") for n in range(self.lowest, self.lowest + 40)]

    async def run(self, prompt, generate):
        await asyncio.sleep(0.05)
        reply = await generate(prompt.text)
        exact = float(reply.text == "".join(sorted(prompt.example_id)))
        turns = (Message(role="user", text=prompt.text), reply)
        return Episode(turns=turns, score=Score(reward=exact, components={"exact": exact}))
'''
SETTINGS = """
[[environments]]
name = "two"
use = "sorts.py:Sorts"
options = { name = "two", lowest = 50 }

[[environments]]
name = "three"
use = "sorts.py:Sorts"
options = { name = "three", lowest = 500 }
after = ["two"]
unlock_at = 0.6

[curriculum]
enabled = true
window_groups = 16
min_groups = 4
state_interval_s = 0.2

[worker]
group_size = 2
concurrency = 2

[supervisor]
workers = 1

[learner]
rollouts_per_step = 100000
"""


class Learns(SortingGenerator):
    """A policy that sorts nothing until it has learned to; then two digits always, and three in half of its answers."""

    learned = False

    def answer(self, text: str, seed: int, temperature: float) -> str:
        digits = text.removesuffix(">")
        right = self.learned and (len(digits) == 2 or seed % 2 == 0)
        return "".join(sorted(digits)) if right else "0"


def states(run: RealRun) -> list[MixtureState]:
    return [record for record in run.read("control") if isinstance(record, MixtureState)]


def environments_of_groups(run: RealRun) -> dict[str, list[tuple[str, str]]]:
    """For each process of a worker, the environment and prompt of each group, in the order in which it started them."""
    collected: dict[str, dict[int, tuple[str, str]]] = {}
    for rollout in run.read("rollouts"):
        if isinstance(rollout, Rollout):
            process, number, _secret = rollout.group_id.rsplit(".", 2)
            collected.setdefault(process, {})[int(number)] = (rollout.environment, rollout.example_id)
    return {process: [group for _number, group in sorted(groups.items())] for process, groups in collected.items()}


def start(run: RealRun, url: str, **settings: object) -> "subprocess.Popen[bytes]":
    config = str(run.directory / "run.toml")
    return run.start("env", "--config", config, worker__inference_urls=f'["{url}"]', **settings)


def await_state(
    run: RealRun, process: "subprocess.Popen[bytes]", what: str, holds: Callable[[MixtureState], bool]
) -> None:
    def there() -> bool:
        assert process.poll() is None, run.log_of(process)[-3000:]
        known = states(run)
        return bool(known) and holds(known[-1])

    eventually(there, 120, what, every_s=0.2)


def rate(state: MixtureState, environment: str) -> float:
    """Success rate of an environment; -1 before eight groups."""
    [actual] = [each for each in state.environments if each.environment == environment]
    return actual.successes / actual.trials if actual.trials >= 8 else -1.0


def unlocked(state: MixtureState) -> set[str]:
    return {each.environment for each in state.environments if each.unlocked}


def until_killed(run: RealRun, policy: Learns, url: str) -> tuple[int, MixtureState]:
    """Play until the second lesson is half learned, and kill the worker.

    Return how many of its groups were on the log before the last forty, and the last state that it wrote. `control` is
    compacted, so this state may be gone once the next worker has written its own.
    """
    worker = start(run, url)
    await_state(run, worker, "groups that fail", lambda state: rate(state, "two") == 0.0)
    assert unlocked(states(run)[-1]) == {"two"}
    [groups] = environments_of_groups(run).values()
    assert {environment for environment, _prompt in groups} == {"two"}, "the second lesson is locked"

    policy.learned = True
    await_state(
        run,
        worker,
        "the first lesson mastered, and the second half",
        lambda state: rate(state, "two") > 0.95 and 0.2 < rate(state, "three") < 0.8,
    )
    assert unlocked(states(run)[-1]) == {"two", "three"}
    [groups] = environments_of_groups(run).values()
    begun = len(groups)
    eventually(lambda: len(*environments_of_groups(run).values()) >= begun + 40, 120, "forty more groups", every_s=0.2)
    [groups] = environments_of_groups(run).values()
    shares = Counter(environment for environment, _prompt in groups[begun : begun + 40])
    # The weight of a mastered lesson is 4 * 0.95 * 0.05 or less, that of a half learned one nearly 1.
    assert shares["three"] >= 26
    worker.kill()
    worker.wait(60)
    return begun, states(run)[-1]


def drawn_of(state: MixtureState) -> dict[str, int]:
    return {each.environment: each.drawn for each in state.environments}


@pytest.mark.long
def test_lessons_and_weights_follow_what_the_policy_learns_and_outlive_a_killed_worker(real_run: RealRun) -> None:
    run = real_run.prepare()
    (run.directory / "sorts.py").write_text(SORTS)
    (run.directory / "run.toml").write_text(SETTINGS)
    run.start("group")
    policy = Learns()
    with serving(policy) as server:
        try:
            begun, left = until_killed(run, policy, server.base_url)
            # Nothing succeeds any more, so a curriculum that began anew would never come to the second lesson.
            policy.learned = False
            again = start(run, server.base_url, worker__groups=12)
            assert again.wait(120) == 0, run.log_of(again)[-3000:]
        finally:
            run.stop()  # the server waits for its clients
    _first, second = sorted(environments_of_groups(run).values(), key=len, reverse=True)
    begun_again = Counter(environment for environment, _prompt in second)
    assert begun_again.total() == 12
    assert begun_again["three"] >= 6
    went_on = drawn_of(left)
    in_the_end = {name: went_on[name] + begun_again[name] for name in went_on}
    assert drawn_of(states(run)[-1]) == in_the_end, "it counts on from the last state of the killed worker"
    assert went_on["two"] + went_on["three"] > begun
    for name, lowest in (("two", 50), ("three", 500)):
        order = PromptOrder(40, seed=f"0/{name}", drawn=went_on[name])
        expected = [str(lowest + order.draw()) for _ in range(begun_again[name])]
        assert [prompt for environment, prompt in second if environment == name] == expected
