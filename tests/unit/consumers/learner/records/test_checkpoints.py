"""A checkpoint restores every bit, its position and its steps; an interrupted save is not a checkpoint."""

import multiprocessing
import resource
import shutil
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from rollstream.consumers.learner.checkpoint_paths import LearnerPosition, first_needed, learner_directory
from rollstream.consumers.learner.config import CheckpointConfig, LearnerConfig
from rollstream.consumers.learner.objective import OptimizerConfig
from rollstream.consumers.learner.records import checkpoints as checkpoints_module
from rollstream.consumers.learner.records.checkpoints import CheckpointFailed, Checkpoints
from rollstream.consumers.learner.reproducibility import fingerprint
from rollstream.consumers.learner.training.train_step import TrainState, TrainStep
from rollstream.consumers.models.config import DecoderConfig
from rollstream.topics.errors import ConfigurationError, Fenced, StateRefused
from rollstream.topics.files.atomic_files import DirectoryLock, StoreError, lock_directory
from rollstream.topics.heartbeats import Heartbeats
from rollstream.topics.records import BatchUse, LearnerStep, same
from tests.support.waiting import eventually

CONFIG = LearnerConfig(model=DecoderConfig(num_hidden_layers=1))
RECORD = LearnerStep(
    learner="default",
    step=7,
    input_run="r",
    uses=(BatchUse(batch_id="0-1", index_offset=2, rows=16, use="trained"),),
    position=3,
    policy_version=7,
    params_digest="d",
    trained_total=16,
    skipped_total=0,
    metrics={"loss": 0.1},
    timestamp=1.5,
)


@pytest.fixture(scope="module")
def fresh() -> TrainState:
    return TrainStep(CONFIG).initial_state()


def at(state: TrainState, step: int) -> TrainState:
    noise = np.random.default_rng(step)
    params = {
        name: jnp.asarray(noise.standard_normal(value.shape).astype(np.float32)) for name, value in state.params.items()
    }
    return state._replace(params=params, step=jnp.asarray(step, jnp.int32))


def learner_position(position: int) -> LearnerPosition:
    return LearnerPosition(position=position, trained_total=5, skipped_total=1, recent_steps=(RECORD,))


def test_a_checkpoint_gives_back_what_was_saved(fresh: TrainState, tmp_path: Path) -> None:
    saved = at(fresh, 7)
    with Checkpoints(CheckpointConfig(directory=str(tmp_path)), "run", "default") as checkpoints:
        assert checkpoints.restore(fresh) is None
        checkpoints.save(saved, learner_position(3), {"jax": "1"})
        checkpoints.wait()
    with Checkpoints(CheckpointConfig(directory=str(tmp_path)), "run", "default") as checkpoints:
        restored = checkpoints.restore(fresh)
    assert restored is not None
    assert jax.tree.structure(restored.state) == jax.tree.structure(fresh)
    for actual, expected in zip(jax.tree.leaves(restored.state), jax.tree.leaves(saved), strict=True):
        assert same(np.asarray(actual), np.asarray(expected))
    assert restored.position == learner_position(3)
    assert restored.fingerprint == {"jax": "1"}


def test_who_waits_for_a_slow_disk_shows_that_the_learner_is_alive(
    fresh: TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, finish = [0.0], ocp.CheckpointManager.wait_until_finished
    heartbeats = Heartbeats(lambda: now_s[0])
    heartbeats.beat("training")

    def slow(manager: ocp.CheckpointManager) -> None:
        eventually(lambda: not heartbeats.stuck(1e5), 60, "a beat")
        finish(manager)

    with Checkpoints(CheckpointConfig(directory=str(tmp_path)), "run", "default") as checkpoints:
        checkpoints.save(fresh, learner_position(0), {})
        monkeypatch.setattr(checkpoints_module, "beating_during", heartbeats.during)
        monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", slow)
        now_s[0] = 1e6
        assert heartbeats.stuck(1e5)
        checkpoints.wait()
        assert checkpoints.steps == [0]


def test_the_newest_of_the_checkpoints_kept_is_restored(fresh: TrainState, tmp_path: Path) -> None:
    with Checkpoints(CheckpointConfig(directory=str(tmp_path), keep=2), "run", "default") as checkpoints:
        for step in (0, 20, 40):
            checkpoints.save(at(fresh, step), learner_position(step), {})
        checkpoints.wait()
        restored = checkpoints.restore(fresh)
    assert restored is not None
    assert (int(restored.state.step), restored.position.position) == (40, 40)
    assert sorted(path.name for path in (tmp_path / "run" / "default").iterdir()) == ["20", "40"]


def test_only_the_learner_itself_deletes_remains_of_interrupted_saves(fresh: TrainState, tmp_path: Path) -> None:
    config = CheckpointConfig(directory=str(tmp_path))
    directory = tmp_path / "run" / "default"
    unfinished = directory / "40.orbax-checkpoint-tmp"
    (unfinished / "meta").mkdir(parents=True)
    with Checkpoints(config, "run", "default"):
        pass
    assert unfinished.exists(), "as by `rollstream retrain`, while the learner may be saving"
    with Checkpoints(config, "run", "default", owner=True) as checkpoints:
        checkpoints.save(at(fresh, 20), learner_position(20), {})
        checkpoints.wait()
    assert [path.name for path in directory.iterdir()] == ["20"]


def locked(directory: Path) -> DirectoryLock:
    """Return the lock of a learner's checkpoints, once it is free."""

    def attempt() -> DirectoryLock | None:
        with suppress(StoreError):
            return lock_directory(directory, ".default.lock")
        return None

    return eventually(attempt, 60, "the lock")


def test_a_learner_waits_for_the_save_of_the_one_before_it_which_saves_no_more(
    fresh: TrainState, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rollstream")
    config = CheckpointConfig(directory=str(tmp_path))
    unfinished = tmp_path / "run" / "default" / "40.orbax-checkpoint-tmp"
    with Checkpoints(config, "run", "default", owner=True) as before:
        before.save(at(fresh, 20), learner_position(20), {})
        before.save(at(fresh, 30), learner_position(30), {})
        before.wait()
        unfinished.mkdir()
        saving = locked(tmp_path / "run")
        opened: list[Checkpoints] = []
        opening = threading.Thread(
            target=lambda: opened.append(Checkpoints(config, "run", "default", owner=True)), daemon=True
        )
        opening.start()
        eventually(lambda: "checkpoints_locked" in caplog.messages, 60, "the new learner waits")
        assert not opened
        assert unfinished.exists()
        saving.release()
        opening.join(60)
        with opened[0] as after:
            with pytest.raises(Fenced, match="another process of this name has begun to write the checkpoints"):
                before.save(at(fresh, 40), learner_position(40), {})
            after.save(at(fresh, 40), learner_position(40), {})
            after.wait()
            assert after.steps == [20, 30, 40]


def test_a_save_that_never_ends_holds_up_no_learner_for_ever(
    fresh: TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints_module, "PATIENCE_S", 0.2)
    config = CheckpointConfig(directory=str(tmp_path))
    unfinished = tmp_path / "run" / "default" / "40.orbax-checkpoint-tmp"
    unfinished.mkdir(parents=True)
    with locked(tmp_path / "run"), Checkpoints(config, "run", "default", owner=True) as checkpoints:
        checkpoints.save(at(fresh, 20), learner_position(20), {})
        checkpoints.wait()
        assert checkpoints.steps == [20]
        assert unfinished.exists(), "it may be written still"


def test_a_save_that_takes_too_long_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def given_up(_manager: ocp.CheckpointManager) -> None:
        raise TimeoutError("0 of 4")

    assert ocp.AsyncOptions().timeout_secs < checkpoints_module.SAVE_TIMEOUT_S
    # Given up for real, a save would go on writing while the next tests run.
    with (
        Checkpoints(CheckpointConfig(directory=str(tmp_path)), "run", "default") as checkpoints,
        monkeypatch.context() as patched,
    ):
        patched.setattr(ocp.CheckpointManager, "wait_until_finished", given_up)
        with pytest.raises(CheckpointFailed, match=r"within 24 h \(TimeoutError: 0 of 4\); .* faster store"):
            checkpoints.wait()


def test_what_the_oldest_complete_checkpoint_needs_is_the_oldest_offset_of_its_buffer_or_its_position(
    fresh: TrainState, tmp_path: Path
) -> None:
    with Checkpoints(CheckpointConfig(directory=str(tmp_path), keep=2), "run", "default") as checkpoints:
        needed = [first_needed(checkpoints.directory)]
        for step, oldest in ((0, -1), (20, 11), (40, 31)):
            checkpoints.save(at(fresh, step), replace(learner_position(step + 3), oldest=oldest), {})
            # A save may be complete by now or not.
            assert first_needed(checkpoints.directory) in (needed[-1], {0: 3, 20: 3, 40: 11}[step])
            checkpoints.wait()
            needed.append(first_needed(checkpoints.directory))
    assert needed == [None, 3, 3, 11]
    directory = tmp_path / "run" / "default"
    (directory / "20" / "meta" / "metadata").unlink()  # the checkpoint is being deleted
    (directory / "60.orbax-checkpoint-tmp-0").mkdir()
    assert first_needed(directory) == 31
    shutil.rmtree(directory)
    assert first_needed(directory) is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (replace(CONFIG, model=replace(CONFIG.model, hidden_size=32)), "learner.model.hidden_size was 64, is 32"),
        (replace(CONFIG, optimizer=OptimizerConfig(name="lion")), "learner.optimizer.name was 'adamw', is 'lion'"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_with_the_settings_that_differ(
    fresh: TrainState, tmp_path: Path, changed: LearnerConfig, named: str
) -> None:
    with Checkpoints(CheckpointConfig(directory=str(tmp_path)), "run", "default") as checkpoints:
        checkpoints.save(at(fresh, 20), learner_position(20), fingerprint(CONFIG))
        checkpoints.wait()
        other = TrainStep(replace(changed, advantage_limit=7.0)).abstract_state()
        with pytest.raises(StateRefused) as refused:
            checkpoints.restore(other, fingerprint=fingerprint(replace(changed, advantage_limit=7.0)))
        text = str(refused.value)
        assert f"the checkpoint of step 20 in {checkpoints.directory} cannot be restored" in text
        assert f"({named}; learner.advantage_limit was 100.0, is 7.0; " in text
        assert "another learner.name with learner.take_over" in text
        assert "\n" not in text
        with pytest.raises(StateRefused, match=r"the model and optimizer of this learner \(\w+Error: .*\); "):
            checkpoints.restore(other)
        assert checkpoints.restore(fresh, fingerprint=fingerprint(changed)) is not None


def save_with_a_full_disk(directory: Path) -> None:
    """Save one checkpoint, and another one after the system has begun to refuse writes."""
    fresh = TrainStep(CONFIG).initial_state()
    with pytest.raises(CheckpointFailed, match=r"no checkpoint could be written to .*make room there"):  # noqa: PT012, SIM117
        with Checkpoints(CheckpointConfig(directory=str(directory)), "run", "default", owner=True) as checkpoints:
            checkpoints.save(at(fresh, 20), learner_position(20), {})
            checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            checkpoints.save(at(fresh, 40), learner_position(40), {})
            # The failed save keeps no other learner of the name waiting.
            locked(directory / "run").release()
            checkpoints.wait()


def test_a_save_that_the_disk_refuses_is_one_line_and_the_checkpoint_before_it_is_restored(
    fresh: TrainState, tmp_path: Path
) -> None:
    # In a process of its own, because the limit applies to the whole process.
    process = multiprocessing.get_context("spawn").Process(target=save_with_a_full_disk, args=(tmp_path,))
    process.start()
    process.join(600)
    assert process.exitcode == 0
    with Checkpoints(CheckpointConfig(directory=str(tmp_path)), "run", "default") as checkpoints:
        assert checkpoints.steps == [20]
        restored = checkpoints.restore(fresh)
        assert restored is not None
        assert int(restored.state.step) == 20
        checkpoints.save(at(fresh, 40), learner_position(40), {})
        checkpoints.wait()
        assert checkpoints.steps == [20, 40]


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "a/b", "/tmp/x", "a\\b", "a\0b", "-x", "x" * 101])
def test_no_name_of_a_learner_leads_out_of_the_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="letters, digits"):
        LearnerConfig(name=name)
    with pytest.raises(ConfigurationError, match="letters, digits"):
        learner_directory(str(tmp_path), "main", name)
