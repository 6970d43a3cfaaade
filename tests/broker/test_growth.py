"""How costs grow is measured with real processes and commands, here with sizes so small that figures mean nothing."""

import json

import pytest

from tests.bench.growth.__main__ import main

SIZES = {
    "--open-groups": ("100", "200"),
    "--partitions": ("1", "2"),
    "--processes": ("1", "2"),
    "--megabytes": ("1", "2"),
    "--archived": ("1",),
}


@pytest.mark.long
def test_every_cost_is_measured_on_a_real_broker(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", *(word for flag, values in SIZES.items() for word in (flag, *values))]) in (0, 1)
    document = json.loads(capsys.readouterr().out)
    things = {series["over"] for series in document["series"]}
    assert things == {"open groups", "partitions", "processes", "GB of rollouts, 2,560 tokens"}
    names = {series["name"]: len(series["points"]) for series in document["series"]}
    assert names["a second one joins"] == names["lineage"] == 2
    assert names["restore"] == names["sql"] == 1
    assert all(cost > 0 for series in document["series"] for _size, cost in series["points"])
