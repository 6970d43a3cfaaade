"""An archive whose journals are ahead of its rollouts or batches is not restored, over a model of Kafka."""

from contextlib import suppress

import pytest

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive.archiver import Archiver
from rollstream.consumers.archive.completeness import check_complete
from rollstream.consumers.archive.manifest import ArchiveManifest
from rollstream.consumers.archive.restorer import restore
from rollstream.topics.config import TopicsConfig
from rollstream.topics.errors import StateRefused
from tests.simulation.installation import World
from tests.support.archiving import Stopped, StoppingStore
from tests.support.modelled_run import KAFKA, RUN, ModelledRun


def archive(world: World, store: StoppingStore) -> ArchiveManifest:
    """Archive in many commits, until the store stops; return what is archived then."""

    def work() -> None:
        with suppress(Stopped), Archiver(KAFKA, RUN, store, flush_bytes=1500) as archiver:
            archiver.once()

    world.result_of(work)
    store.stop_after(10**9, True)
    newest = manifests.newest(store, RUN)
    assert newest is not None
    return newest


def refusal(store: StoppingStore, archived: ArchiveManifest) -> str:
    """The message with which an archive is refused; empty if it is not."""
    try:
        check_complete(store, archived)
    except StateRefused as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("archived_before", [False, True])
def test_an_archive_that_was_cut_short_is_refused_and_another_pass_completes_it(
    world: World, archived_before: bool
) -> None:
    refusals, changes = set[str](), 1
    while changes < 10**9:
        run, store = ModelledRun(world), StoppingStore()
        run.send()
        run.group()
        if archived_before:
            check_complete(store, archive(world, store))
        run.send()
        run.group()
        store.stop_after(changes, True)
        cut = archive(world, store)
        changes += 5
        if refused := refusal(store, cut):
            refusals.add(refused.split(", but it is archived")[0].split(";")[0])
            assert f"run `rollstream archive --run {RUN}` to complete it, then restore it" in refused
            with pytest.raises(StateRefused, match=r"is incomplete|holds no topics"):
                world.result_of(lambda cut=cut, store=store: restore(KAFKA, TopicsConfig(), store, cut, "again"))
            assert not [topic for topic in run.cluster.topics if topic.startswith("again.")]
        whole = archive(world, store)
        check_complete(store, whole)
        if cut.topics == whole.topics:
            break
    assert archived_before or f"the archive of run {RUN} in test holds no topics yet" in refusals
    before = f"the archive of run {RUN} in test is incomplete: when the last record of journal[0] was written, "
    positions, batches = (9,) if archived_before else (5, 9), (2,) if archived_before else (1, 2)
    assert refusals <= {
        f"the archive of run {RUN} in test holds no topics yet",
        *(f"{before}grouping had read rollouts[0] up to {position}" for position in positions),
        *(f"{before}the next batch of batches[0] was number {number}" for number in batches),
    }
    assert f"{before}grouping had read rollouts[0] up to 9" in refusals


def test_a_journal_ahead_of_the_batches_is_refused_although_the_rollouts_are_there(world: World) -> None:
    run, store = ModelledRun(world), StoppingStore()
    for _ in range(2):
        run.send()
        run.group()
    whole = archive(world, store)
    for batches, reached in ((0, "none"), (1, "number 0")):
        left = [file for file in whole.files if file.topic != "batches"]
        left += [file for file in whole.files_of("log") if file.topic == "batches"][:batches]
        with pytest.raises(StateRefused, match=rf"was number 2, but it is archived up to {reached}; run"):
            check_complete(store, ArchiveManifest(run=RUN, topics=whole.topics, files=tuple(left)))
        check_complete(store, ArchiveManifest(run=RUN, topics=whole.topics, files=tuple(left)), incomplete=True)
    with pytest.raises(StateRefused, match="holds no topics yet"):
        check_complete(store, ArchiveManifest(run=RUN, topics={}, files=()), incomplete=True)
