"""The gauges of grouping: the newest of each partition, whichever process wrote them."""

from rollstream.pipeline.run.autoscaling import GroupingGauges
from rollstream.topics.records import Metrics


def record(component: str, values: dict[str, float], **labels: str) -> Metrics:
    return Metrics(component=component, timestamp=0.0, step=-1, values=values, labels=labels)


def test_a_partition_keeps_its_lag_while_it_moves_and_counts_once() -> None:
    gauges = GroupingGauges("r.grouper")
    assert (gauges.partitions, gauges.lag, gauges.position) == (0, 0, 0)
    for partition in ("0", "1"):
        values = {"position": 10.0, "lag": 100.0}
        gauges.add(record("grouper-r-0", values, consumergroup="r.grouper", partition=partition))
    assert (gauges.partitions, gauges.lag, gauges.position) == (2, 200, 20)
    # Another process restored the partition: first without a known end, then with one.
    gauges.add(record("grouper-r-1", {"position": 30.0}, consumergroup="r.grouper", partition="1"))
    assert (gauges.lag, gauges.position) == (200, 40)
    gauges.add(record("grouper-r-1", {"position": 40.0, "lag": 5.0}, consumergroup="r.grouper", partition="1"))
    assert (gauges.partitions, gauges.lag, gauges.position) == (2, 105, 50)


def test_records_about_anything_else_are_left_out() -> None:
    gauges = GroupingGauges("r.grouper")
    gauges.add(record("grouper-r-0", {"lag": 7.0}, consumergroup="r.grouper"))
    gauges.add(record("grouper-q-0", {"lag": 7.0}, consumergroup="q.grouper", partition="0"))
    gauges.add(record("labeler-r-0", {"lag": 7.0}))
    gauges.add(record("grouper-r-0", {"lag": 7.0}, consumergroup="r.grouper", partition="x"))
    gauges.add(record("grouper-r-0", {"lag": float("nan")}, consumergroup="r.grouper", partition="0"))
    assert (gauges.partitions, gauges.lag) == (0, 0)
