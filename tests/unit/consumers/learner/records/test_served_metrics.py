"""What a learner serves at /metrics: the newest step, with its own time, and why rollouts were left out of it."""

from dataclasses import replace

from rollstream.consumers.learner.records.served_metrics import serve, serve_newest
from rollstream.topics.metrics.catalogue import CATALOGUE_OF_METRICS
from rollstream.topics.metrics.values import VALUES
from rollstream.topics.records import LearnerStep

SPECS = {spec.name: spec for spec in CATALOGUE_OF_METRICS}


def step_of(number: int) -> LearnerStep:
    return LearnerStep(
        learner="a",
        step=number,
        input_run="r",
        uses=(),
        position=number,
        policy_version=number,
        params_digest="d",
        trained_total=0,
        skipped_total=0,
        metrics={"trained/reward": float(number)},
        timestamp=1.8e9 + number,
    )


def test_a_learner_that_resumes_serves_the_newest_step_on_record_with_its_own_time() -> None:
    def served() -> tuple[float, ...]:
        names = ("step", "policy_version", "step_timestamp_seconds")
        return tuple(VALUES.values_of(SPECS[f"rollstream_learner_{name}"])[()] for name in names)

    recorded = [step_of(0), step_of(1), replace(step_of(2), policy_version=-1)]
    serve_newest(recorded)
    assert served() == (2, 1, recorded[-1].timestamp)
    serve_newest([])
    assert served() == (2, 1, recorded[-1].timestamp)


def test_a_reason_for_which_nothing_is_left_out_any_more_is_served_no_more() -> None:
    served = []
    for number, metrics in enumerate(
        ({"left_out/too_long": 10.0, "left_out/temperature": 1.0}, {"left_out/too_long": 2.0}, {})
    ):
        serve(replace(step_of(number), metrics=metrics))
        served.append(VALUES.values_of(SPECS["rollstream_learner_left_out"]))
    assert served == [{("too_long",): 10.0, ("temperature",): 1.0}, {("too_long",): 2.0}, {}]
