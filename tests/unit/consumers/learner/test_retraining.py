"""The differences of two executions are named setting by setting."""

from dataclasses import replace

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.reproducibility import differences, fingerprint
from rollstream.consumers.learner.retraining import RetrainedStep, Retraining


def test_settings_are_told_one_by_one() -> None:
    config = LearnerConfig()
    other = replace(
        config,
        seed=3,
        model=replace(config.model, tie_word_embeddings=not config.model.tie_word_embeddings),
        name="b",
    )
    then, now = fingerprint(config), {**fingerprint(other), "jax": "9.9"}
    assert differences(then, then) == {}
    tied = repr(config.model.tie_word_embeddings), repr(other.model.tie_word_embeddings)
    assert differences(then, now) == {
        "jax": (then["jax"], "9.9"),
        "learner.model.tie_word_embeddings": tied,
        "learner.seed": ("0", "3"),
    }
    del now["device"]
    assert differences(then, now)["device"] == (then["device"], "")


def test_the_first_step_that_differs_is_named() -> None:
    def step(number: int, again: str) -> RetrainedStep:
        return RetrainedStep(step=number, batches=1, trained=1, skipped=0, recorded="a", again=again)

    same, other = step(3, "a"), step(4, "b")
    retraining = Retraining(learner="a", checkpoint=3, last=9, steps=(same,), environment={})
    assert retraining.difference is None
    assert replace(retraining, steps=(same, other)).difference == other
