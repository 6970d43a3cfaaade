"""The mixture of a worker: starts in the ratio of the weights, and a curriculum that follows success."""

import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.config import CurriculumConfig, EnvironmentConfig, WorkerConfig
from rollstream.producers.environments.environment import Prompt, Score, SingleTurn, Split
from rollstream.producers.flow.mixture import (
    Mixture,
    PromptOrder,
    PromptPools,
    difficulty_weight,
    groups_counted,
    pool_sizes,
)
from rollstream.producers.tasks.environment_loading import LoadedEnvironment, with_settings
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import EnvironmentState, MixtureState
from rollstream.topics.wire.codec import decode, encode

ON = CurriculumConfig(enabled=True, min_groups=4, window_groups=16, floor=0.1)


class Numbers(SingleTurn):
    max_tokens = 4

    def __init__(self, name: str, prompts: int = 6) -> None:
        self.name = name
        self._prompts = [Prompt(example_id=str(n), text=str(n)) for n in range(prompts)]

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._prompts

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        return Score(reward=0.0)


def environment(name: str, **entry: Any) -> LoadedEnvironment:
    return with_settings(Numbers(name), WorkerConfig(), EnvironmentConfig(use="x:Y", **entry))


def started(mixture: Mixture, groups: int) -> list[str]:
    """Names of the environments of the next groups, each started at once."""
    names = []
    for _ in range(groups):
        first = mixture.candidates()[0]
        mixture.start(first)
        names.append(first.name)
    return names


@given(weights=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_groups_are_started_in_the_ratio_of_the_weights(weights: list[int]) -> None:
    mixture = Mixture([environment(f"e{i}", weight=weight) for i, weight in enumerate(weights)])
    counts = Counter(started(mixture, 10 * sum(weights)))
    for i, weight in enumerate(weights):
        # Rounding of the sums of 1 / weight may move one start over the end.
        assert abs(counts[f"e{i}"] - 10 * weight) <= 1


def test_an_environment_that_had_to_wait_does_not_make_up_for_it() -> None:
    slow, fast = environment("slow"), environment("fast")
    mixture = Mixture([slow, fast])
    for _ in range(100):
        mixture.start(fast)
    assert 5 <= Counter(started(mixture, 10))["slow"] <= 6


def test_prompts_come_in_epochs_of_each_environment() -> None:
    mixture = Mixture([environment("a"), environment("b", weight=2.0)], seed=3)
    drawn: dict[str, list[str]] = {"a": [], "b": []}
    for _ in range(18):
        first = mixture.candidates()[0]
        drawn[first.name].append(mixture.start(first).example_id)
    assert sorted(drawn["a"]) == sorted(drawn["b"][:6]) == sorted(drawn["b"][6:]) == list("012345")


@given(rate=st.floats(0, 1))
def test_the_weight_peaks_at_one_half_and_has_a_floor(rate: float) -> None:
    assert 0.1 <= difficulty_weight(rate, 0.1) <= difficulty_weight(0.5, 0.1) == 1.0
    assert math.isclose(difficulty_weight(rate, 0.1), difficulty_weight(1 - rate, 0.1), abs_tol=1e-9)


def test_what_is_mastered_and_what_is_hopeless_are_played_rarely() -> None:
    mixture = Mixture([environment("mastered"), environment("half"), environment("hopeless")], curriculum=ON)
    for group in range(16):
        mixture.curriculum.note_group("mastered", 1.0)
        mixture.curriculum.note_group("half", float(group % 2))
        mixture.curriculum.note_group("hopeless", 0.0)
    weights = mixture.curriculum.weights()
    assert weights["mastered"] == weights["hopeless"] == pytest.approx(0.1)
    assert weights["half"] > 0.99
    counts = Counter(started(mixture, 120))
    assert (counts["mastered"], counts["half"], counts["hopeless"]) == (10, 100, 10)


def test_without_a_curriculum_success_changes_nothing() -> None:
    mixture = Mixture([environment("a", weight=3.0)])
    for _ in range(100):
        mixture.curriculum.note_group("a", 1.0)
    assert mixture.curriculum.weights() == {"a": 3.0}


def test_a_lesson_unlocks_once_those_before_it_are_good_enough_and_stays_so() -> None:
    lessons = [environment("easy"), environment("hard", after=("easy",), unlock_at=0.75)]
    mixture = Mixture(lessons, curriculum=ON)
    curriculum = mixture.curriculum
    assert set(started(mixture, 20)) == {"easy"}
    for _ in range(3):
        curriculum.note_group("easy", 1.0)
    assert curriculum.success_rate("easy") is None, "three groups say nothing yet"
    assert curriculum.weights()["hard"] == 0.0
    for _ in range(2):
        curriculum.note_group("easy", 1.0)
    assert curriculum.weights()["hard"] > 0.0
    for _ in range(50):
        curriculum.note_group("easy", 0.0)
    assert curriculum.weights()["hard"] > 0.0, "what was learned is practised on when it is forgotten"


@pytest.mark.parametrize(("min_groups", "window_groups"), [(8, 8), (63, 64), (64, 64), (1, 1)])
def test_a_lesson_unlocks_after_as_many_groups_as_must_be_measured(min_groups: int, window_groups: int) -> None:
    lessons = [environment("easy"), environment("hard", after=("easy",))]
    config = CurriculumConfig(min_groups=min_groups, window_groups=window_groups)
    curriculum = Mixture(lessons, curriculum=config).curriculum
    for _ in range(min_groups):
        assert curriculum.weights()["hard"] == 0.0
        curriculum.note_group("easy", 1.0)
    assert curriculum.weights()["hard"] > 0.0


@given(window=st.integers(1, 1000), groups=st.integers(0, 1000))
def test_the_groups_behind_decayed_trials_are_known_up_to_the_window(window: int, groups: int) -> None:
    trials = 0.0
    for _ in range(groups):
        trials = trials * (1.0 - 1.0 / window) + 1.0
    assert groups_counted(trials, window) == groups if groups <= window else groups_counted(trials, window) >= window


def test_the_groups_of_all_workers_count_towards_those_that_must_be_measured() -> None:
    lessons = [environment("easy"), environment("hard", after=("easy",))]
    config = CurriculumConfig(min_groups=8, window_groups=8)
    mine, other = (Mixture(lessons, curriculum=config) for _ in range(2))
    for mixture in (mine, other):
        for _ in range(4):
            mixture.curriculum.note_group("easy", 1.0)
    restarted = Mixture(lessons, curriculum=config, state=MixtureState(worker_id="w", environments=mine.states()))
    assert restarted.curriculum.weights()["hard"] == 0.0
    restarted.curriculum.note_others([MixtureState(worker_id="other", environments=other.states())])
    assert restarted.curriculum.weights()["hard"] > 0.0


def test_a_restart_goes_on_with_prompts_success_rates_and_unlocked_lessons() -> None:
    lessons = [environment("easy"), environment("hard", after=("easy",))]
    before = Mixture(lessons, curriculum=ON)
    drawn = [before.start(lessons[0]).example_id for _ in range(4)]
    for _ in range(8):
        before.curriculum.note_group("easy", 1.0)
    record = decode(encode(MixtureState(worker_id="w", environments=before.states(), wall_time=1.0)))
    assert isinstance(record, MixtureState)
    after = Mixture(lessons, curriculum=ON, state=record)
    assert after.curriculum.weights() == before.curriculum.weights()
    assert sorted([*drawn, *(after.start(lessons[0]).example_id for _ in range(2))]) == list("012345")


def test_groups_of_other_workers_count_too_and_what_they_unlocked_is_unlocked() -> None:
    lessons = [environment("easy"), environment("hard", after=("easy",), unlock_at=0.5)]
    curriculum = Mixture(lessons, curriculum=ON).curriculum
    for _ in range(2):
        curriculum.note_group("easy", 1.0)
    other = MixtureState(
        worker_id="other",
        environments=(
            EnvironmentState(environment="easy", successes=1.0, trials=4.0),
            EnvironmentState(environment="hard", unlocked=True),
        ),
    )
    curriculum.note_others([other])
    assert curriculum.success_rate("easy") == pytest.approx(0.5, abs=0.03)
    assert curriculum.weights()["hard"] > 0.0


def test_a_paused_environment_begins_nothing_and_weights_are_those_that_are_wanted() -> None:
    mixture = Mixture([environment("a"), environment("b"), environment("c")])
    mixture.adjust(paused={"c", "elsewhere"}, weights={"a": 3.0})
    assert Counter(started(mixture, 40)) == {"a": 30, "b": 10}
    mixture.adjust(paused={"a", "b", "c"}, weights={})
    assert mixture.candidates() == []
    mixture.adjust(paused=(), weights={})
    again = Counter(started(mixture, 30))
    assert all(9 <= again[name] <= 11 for name in "abc"), "what was paused does not make up for it"


def pooled(state: MixtureState | None = None, **shares: float) -> Mixture:
    return Mixture([environment("a")], seed=5, curriculum=CurriculumConfig(**shares), state=state)


def epoch_of(mixture: Mixture, results: Mapping[str, float] = MappingProxyType({})) -> list[str]:
    """The prompts of the next six groups, each with its result."""
    drawn = []
    for _ in range(6):
        drawn.append(mixture.start(mixture.environments[0]).example_id)
        mixture.note_group("a", drawn[-1], results.get(drawn[-1], 0.5))
    return drawn


def test_prompts_that_all_solve_or_none_are_passed_over_until_a_group_is_mixed() -> None:
    mixture = pooled(easy_share=0.0, hard_share=0.0)
    assert sorted(epoch_of(mixture, {"1": 1.0, "2": 0.0})) == list("012345")
    assert set(epoch_of(mixture)) == set("0345")
    assert sorted(epoch_of(pooled(), {"1": 1.0, "2": 0.0})) == list("012345")
    mixture.note_group("a", "1", 0.25)
    assert "1" in epoch_of(mixture)


def test_a_share_of_a_pool_is_played_in_each_epoch_and_not_always_the_same() -> None:
    mixture = pooled(easy_share=0.5)
    epoch_of(mixture, dict.fromkeys("012345", 1.0))
    played = Counter(epoch_of(mixture, dict.fromkeys("012345", 1.0)) + epoch_of(mixture, dict.fromkeys("012345", 1.0)))
    assert len(played) == 6
    assert mixture.states()[0].drawn > 2 * 12


def test_a_worker_whose_prompts_are_all_in_a_pool_plays_on() -> None:
    mixture = pooled(easy_share=0.0)
    epoch_of(mixture, dict.fromkeys("012345", 1.0))
    assert len(epoch_of(mixture)) == 6


def test_pools_survive_a_restart_and_are_known_to_other_workers() -> None:
    mixture = pooled(easy_share=0.0, hard_share=0.0)
    epoch_of(mixture, {"1": 1.0, "2": 0.0})
    state = decode(encode(MixtureState(worker_id="w", environments=mixture.states())))
    assert isinstance(state, MixtureState)
    again, other = pooled(state, easy_share=0.0, hard_share=0.0), pooled(easy_share=0.0, hard_share=0.0)
    other.note_others([state])
    for later in (again, other):
        assert not {"1", "2"} & set(epoch_of(later))
    assert pooled().states()[0].pools == b""


@pytest.mark.parametrize(
    "packed", [b"", b"junk", zlib.compress(bytes(5)), zlib.compress(bytes(7)), zlib.compress(b"\x07" * 6)]
)
def test_pools_of_other_prompts_or_none_at_all_are_left_out(packed: bytes) -> None:
    state = MixtureState(worker_id="w", environments=(EnvironmentState(environment="a", pools=packed),))
    mixture = pooled(state, easy_share=0.0, hard_share=0.0)
    mixture.note_others([state])
    assert sorted(epoch_of(mixture)) == list("012345")


@pytest.mark.parametrize("name", ["easy_share", "hard_share"])
def test_a_share_beyond_1_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"curriculum.{name} is 1.5"):
        CurriculumConfig(**{name: 1.5})


SIZES = st.integers(1, 40)


@given(prompts=SIZES, workers=st.integers(1, 7), epochs=st.integers(1, 3), seed=st.text(max_size=5))
def test_all_workers_together_draw_each_prompt_once_in_every_epoch(
    prompts: int, workers: int, epochs: int, seed: str
) -> None:
    orders = [PromptOrder(prompts, seed=seed, worker=i, workers=workers) for i in range(workers)]
    drawn: list[list[int]] = [[] for _ in range(epochs)]
    for order in orders:
        while order.epoch < epochs:
            drawn[order.epoch].append(order.draw())
    assert [sorted(epoch) for epoch in drawn] == [list(range(prompts))] * epochs


@given(prompts=SIZES, workers=st.integers(1, 4), before=st.integers(0, 60), after=st.integers(0, 60))
def test_an_order_that_goes_on_draws_what_an_uninterrupted_one_would(
    prompts: int, workers: int, before: int, after: int
) -> None:
    whole = PromptOrder(prompts, seed="s", worker=workers - 1, workers=workers)
    expected = [whole.draw() for _ in range(before + after)]
    rest = PromptOrder(prompts, seed="s", worker=workers - 1, workers=workers, drawn=before)
    assert [rest.draw() for _ in range(after)] == expected[before:]
    assert rest.drawn == whole.drawn


def test_the_seed_and_the_epoch_change_the_order() -> None:
    def epoch(seed: str, number: int) -> list[int]:
        order = PromptOrder(50, seed=seed, drawn=50 * number)
        return [order.draw() for _ in range(50)]

    assert len({tuple(epoch(seed, number)) for seed in ("a", "b") for number in (0, 1)}) == 4
    assert epoch("a", 0) == epoch("a", 0)
    assert Counter(epoch("a", 0)) == Counter(epoch("a", 1))


def test_the_sizes_of_pools_are_counted_and_those_of_no_pools_are_none() -> None:
    pools = PromptPools(5)
    for index, success in ((0, 1.0), (1, 0.0), (2, 0.5), (3, 1.0)):
        pools.note(index, success)
    assert pool_sizes(pools.packed) == {"easy": 2, "hard": 1, "other": 2}
    assert pool_sizes(b"") is None
    assert pool_sizes(b"no pools") is None
