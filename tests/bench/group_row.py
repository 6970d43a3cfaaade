"""Row `group-and-batch`: a grouping process with a backlog, against a transactional copy loop on the same topic."""

from rollstream.topics.catalogue import topic_name
from tests.bench import material, produce_baseline
from tests.bench.measure import Row, Settings, Timing, in_child
from tests.bench.runs import prepared

_COPY, _GROUP = "copy_loop", "grouping_process"


def measure(settings: Settings) -> Row:
    """A fresh run each repetition, read once by the copy loop and once by the grouping process, in turn."""
    records = material.encoded(settings)
    timings: dict[str, list[Timing]] = {_COPY: [], _GROUP: []}
    for repetition in range(settings.repetitions):
        with prepared(settings, "group") as run:
            produce_baseline.measure(settings.kafka, topic_name(run, "rollouts"), records)
            for module in (_COPY, _GROUP) if repetition % 2 == 0 else (_GROUP, _COPY):
                timings[module].append(in_child(module, settings, run))
    return Row(
        name="group-and-batch",
        what=f"consume, fold, batch and commit, groups of {settings.group_size}",
        baseline="consume, produce the same bytes and commit at intervals, by the same clients",
        size_bytes=len(records[0][1]),
        tokens=settings.tokens,
        ours=tuple(timings[_GROUP]),
        raw=tuple(timings[_COPY]),
    )
