"""A learner's figures on the topic `metrics`: each step once, whatever is executed again."""

from dataclasses import replace

from rollstream.consumers.learner.records.metric_sinks import open_sinks
from rollstream.consumers.learner.records.metric_sinks_config import SinksConfig
from rollstream.topics.kafka import provisioning
from rollstream.topics.metric_catalogue import CATALOGUE_OF_METRICS
from rollstream.topics.metric_values import VALUES
from rollstream.topics.metrics import MetricsWriter
from rollstream.topics.records import LearnerStep, Metrics
from tests.support.runs import RealRun


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
        metrics={"reward": float(number)},
    )


def test_a_reason_for_which_nothing_is_left_out_any_more_is_served_no_more(real_run: RealRun) -> None:
    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    sinks = open_sinks(SinksConfig(), real_run.kafka, real_run.name, "a", -1)
    [left_out] = [spec for spec in CATALOGUE_OF_METRICS if spec.name == "rollstream_learner_left_out"]
    served = []
    for number, metrics in enumerate(
        ({"left_out/too_long": 10.0, "left_out/temperature": 1.0}, {"left_out/too_long": 2.0}, {})
    ):
        sinks.write(replace(step_of(number), metrics=metrics))
        served.append(VALUES.values_of(left_out))
    sinks.close()
    assert served == [{("too_long",): 10.0, ("temperature",): 1.0}, {("too_long",): 2.0}, {}]


def test_a_learner_that_executes_steps_again_says_each_on_metrics_once(real_run: RealRun) -> None:
    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    another = MetricsWriter(real_run.kafka, real_run.name, "learn-b", "learn")
    for recorded, steps in ((-1, (0, 1, 2, 3)), (3, (2, 3, 4))):
        sinks = open_sinks(SinksConfig(), real_run.kafka, real_run.name, "a", recorded)
        for step in steps:
            sinks.write(step_of(step))
        sinks.close()
        another.write({"reward": 0.0}, step=9)
        another.close()
    metrics = [r for r in real_run.read("metrics") if isinstance(r, Metrics) and r.component == "learn-a"]
    assert [(r.step, r.values["reward"], r.labels["policy_version"]) for r in metrics] == [
        (n, float(n), str(n)) for n in range(5)
    ]
