"""The state manager within one process: versions from 0, the newest wins, each caller is served its own version."""

import threading

import numpy as np
import pytest

from rollstream.consumers.weights.state_manager import LocalStateManager, StateFollower
from rollstream.topics.errors import DeadlineExceeded, RecordError


def params(value: float) -> dict[str, object]:
    return {"dense": {"kernel": np.full((2, 3), value), "bias": np.full(3, value)}, "step": np.float32(value)}


def test_there_is_no_version_before_the_first_update_which_is_0() -> None:
    states = LocalStateManager()
    assert states.get_state(-1) is None
    assert states.get_state(0) is None
    assert states.update_state(params(1.0)) == 0
    state = states.get_state(-1)
    assert state is not None
    assert state[0] == 0
    assert state[1]["dense"]["kernel"].tolist() == [[1.0] * 3] * 2
    assert states.get_state(0) is None


def test_a_follower_gets_each_state_once_and_counts_what_it_received() -> None:
    states = LocalStateManager()
    one, other = StateFollower(states), StateFollower(states)
    assert (one.get_state(), one.controller_version, one.trainer_version) == (None, -1, -1)
    states.update_state(params(0.0))
    received = one.get_state()
    assert received is not None
    assert (received[0], float(received[1]["step"])) == (0, 0.0)
    assert one.get_state() is None
    states.update_state(params(1.0))
    assert (one.controller_version, one.trainer_version) == (0, 1)
    assert [follower.get_state() is not None for follower in (one, one, other)] == [True, False, True]
    assert (one.controller_version, other.controller_version) == (1, 1)


def test_what_was_given_does_not_change_with_what_the_trainer_changes() -> None:
    states, kept = LocalStateManager(), params(2.0)
    states.update_state(kept)
    kept["dense"]["bias"][:] = 9.0  # type: ignore[index]
    state = states.get_state(-1)
    assert state is not None
    assert state[1]["dense"]["bias"].tolist() == [2.0] * 3
    with pytest.raises(ValueError, match="read-only"):
        state[1]["dense"]["bias"][0] = 1.0


def test_who_waits_gets_the_newest_and_is_told_when_none_comes() -> None:
    states, collected = LocalStateManager(), []
    waiting = threading.Thread(target=lambda: collected.append(states.wait_for(1, 60)[0]))
    waiting.start()
    states.update_state(params(0.0))
    states.update_state(params(1.0))
    waiting.join()
    assert collected == [1]
    with pytest.raises(DeadlineExceeded, match=r"version 2 did not appear within 0\.01 s \(newest: 1\)"):
        states.wait_for(2, 0.01)


def test_names_that_make_no_path_are_refused_in_both_forms_alike() -> None:
    states = LocalStateManager()
    with pytest.raises(RecordError, match="is not an array's name"):
        states.update_state({"a/b": np.zeros(2)})
    assert states.get_state(-1) is None
