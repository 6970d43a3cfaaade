"""The parts of the control example: a sound environment, rewards that follow from observations, targets by hand."""

import importlib
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rollstream.topics.records import EpisodeSpan, RolloutMetadata
from rollstream.topics.wire.trajectory_arrays import Trajectory
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "control"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The example's modules."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    names = ("reach", "policy", "returns", "dqn", "play")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def observations(reach: ModuleType, rng: np.random.Generator, count: int) -> list[dict[str, np.ndarray]]:
    """The same places seen as numbers and as images, each stacked to [count, ...]."""
    seen: list[list[dict[str, np.ndarray]]] = [[], []]
    for _ in range(count):
        seed = int(rng.integers(2**31))
        for image, kept in ((False, seen[0]), (True, seen[1])):
            kept.append(reach.Reach(image=image).reset(seed=seed)[0])
    return [{name: np.stack([one[name] for one in kept]) for name in kept[0]} for kept in seen]


@pytest.mark.parametrize("image", [False, True])
def test_the_environment_is_one_of_gymnasiums(example: SimpleNamespace, image: bool) -> None:
    environment = example.reach.Reach(image=image)
    check_env(environment, skip_render_check=True)
    environment.reset(seed=1)
    ends = [environment.step(0)[2:4] for _ in range(example.reach.MAX_STEPS)]
    assert ends[-1] == (False, True), "cut off at the limit, and not before"
    assert set(ends[:-1]) == {(False, False)}


def test_images_and_numbers_say_the_same(example: SimpleNamespace) -> None:
    state, image = observations(example.reach, np.random.default_rng(0), 50)
    for one, other in zip(example.reach.cells(state), example.reach.cells(image), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(example.reach.expert(state), example.reach.expert(image))


@pytest.mark.parametrize("image", [False, True])
def test_the_expert_takes_the_shortest_way_and_the_rewards_add_up(example: SimpleNamespace, image: bool) -> None:
    environment = example.reach.Reach(image=image)
    for seed in range(20):
        seen, _ = environment.reset(seed=seed)
        agent, target = example.reach.cells(seen)
        distance = int(np.abs(agent - target).sum())
        total, over, steps = 0.0, False, 0
        while not over:
            batch = {name: array[None] for name, array in seen.items()}
            seen, reward, over, _truncated, _ = environment.step(int(example.reach.expert(batch)[0]))
            total, steps = total + reward, steps + 1
        assert steps == distance
        assert total == pytest.approx(1 + 0.05 * distance)


def test_the_labeler_gives_what_the_environment_would_have(example: SimpleNamespace) -> None:
    players = example.play.Players(0, 0, image=True, knows_rewards=True)
    parameters = example.policy.initial(np.random.default_rng(0), image=True)
    steps = [players.step(0, parameters) for _ in range(60)]
    arrays = {
        name: {"image": np.stack([getattr(step, name)["image"] for step in steps])} for name in ("curr_obs", "next_obs")
    }
    labeled = example.reach.judge(Trajectory(arrays=arrays, environment="reach"))
    np.testing.assert_array_equal(labeled.arrays["rewards"], np.stack([step.rewards for step in steps]))
    assert any(step.terminations.any() for step in steps)
    human = np.stack([step.control_modes for step in steps])
    assert {0, 1} == set(human.ravel().tolist())
    np.testing.assert_array_equal(np.stack([step.versions for step in steps]) == -1, human == 1)


@pytest.mark.parametrize("image", [False, True])
def test_the_policy_is_the_same_in_numpy_and_jax(example: SimpleNamespace, image: bool) -> None:
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    parameters = example.policy.initial(rng, image=image)
    seen = observations(example.reach, rng, 6)[image]
    here = example.policy.values(parameters, seen)
    assert here.shape == (6, 5)
    np.testing.assert_allclose(here, example.policy.values(parameters, seen, jnp), rtol=1e-4, atol=1e-6)


def test_targets_of_several_steps_end_where_the_slice_or_the_episode_does(
    example: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are 0 for current observations and 10 for next ones, so the loss depends on the targets alone."""
    import jax.numpy as jnp

    discount = example.dqn.DISCOUNT

    def values(_parameters: object, seen: dict[str, np.ndarray], _xp: ModuleType) -> np.ndarray:
        return jnp.repeat(seen["worth"][..., None], 5, axis=-1)

    monkeypatch.setattr(example.dqn, "values", values)

    def steps(rewards: list[list[float]], terminations: list[list[bool]]) -> dict[str, object]:
        shape = np.shape(rewards)
        return {
            "curr_obs": {"worth": jnp.zeros(shape)},
            "next_obs": {"worth": jnp.full(shape, 10.0)},
            "actions": jnp.zeros(shape, jnp.int32),
            "rewards": jnp.array(rewards),
            "terminations": jnp.array(terminations),
        }

    windows = steps([0.0], [True])  # type: ignore[list-item]
    whole = steps([[1.0, 2.0, 4.0], [1.0, 2.0, 99.0]], [[False] * 3, [False, True, False]])
    whole["windows"] = None
    mask = jnp.array([[True, True, True], [True, True, False]])
    third = 4 + discount * 10
    second = 2 + discount * third
    targets = [1 + discount * second, second, third, 1 + discount * 2, 2.0]
    huber = [x - 0.5 if x > 1 else x * x / 2 for x in targets]
    actual = example.dqn.loss({}, {}, windows, {**whole, "mask": mask})
    assert float(actual) == pytest.approx(np.mean(huber), rel=1e-5)


def test_returns_are_those_of_whole_episodes_by_their_lowest_version(example: SimpleNamespace) -> None:
    returns = example.returns.Returns()

    def trajectory(rewards: list[float], versions: list[int], *spans: EpisodeSpan) -> Trajectory:
        arrays = {"rewards": np.array(rewards)[:, None], "versions": np.array(versions)[:, None]}
        return Trajectory(
            arrays=arrays, environment="e", episodes=spans, metadata=RolloutMetadata(worker_id="w", timestamp=1.0)
        )

    one = EpisodeSpan(uid="a", column=0, start=0, stop=1)
    begun = EpisodeSpan(uid="b", column=0, start=1, stop=3, last=False)
    rest = EpisodeSpan(uid="b", column=0, start=0, stop=2, first=False)
    human = EpisodeSpan(uid="c", column=0, start=2, stop=3, control_mode=1)
    returns.add(trajectory([1, 2, 4], [3, 3, 3], one, begun), at=(0, 5))
    assert (returns.episodes(3), returns.mean(3)) == (1, 1.0)
    returns.add(trajectory([8, 16, 32], [4, 4, -1], rest, human), at=(0, 6))
    assert (returns.episodes(3), returns.mean(3)) == (2, 15.5)
    assert returns.episodes(4) == returns.episodes(-1) == 0
    assert np.isnan(returns.mean(4))
    assert returns.counts == {"policy": 2, "human": 1}
    assert returns.trajectories == {"w": 2}
    assert returns.position == {0: 7}
