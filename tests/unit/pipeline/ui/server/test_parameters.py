"""Pages of lists that change while somebody reads them follow one another."""

import pytest

from rollstream.pipeline.ui.server.answers import UnusableParameter
from rollstream.pipeline.ui.server.ledger_keeper import place_of
from rollstream.pipeline.ui.server.parameters import page_of
from rollstream.pipeline.ui.server.session_list import SessionList
from tests.unit.pipeline.ui.server.test_session_list import interleaved, on_log


def test_a_page_of_ranges_begins_after_a_range_that_has_left_the_list() -> None:
    names = ["0:0-3", "0:6-9", "1:0-4", "1:9-12"]
    assert page_of(names, names, {"limit": "2"}, place_of) == (names[:2], "0:6-9")
    grouped = ["0:0-3", "1:2-4", "1:9-12"]
    assert page_of(grouped, grouped, {"after": "0:6-9"}, place_of) == (["1:2-4", "1:9-12"], None)


def test_a_page_of_sessions_begins_after_a_session_whose_state_has_changed() -> None:
    sessions = SessionList(on_log(interleaved()))
    assert [*sessions.rows] == ["g.1", "g.0"]
    finished = ["g.0"]
    assert page_of(finished, finished, {"after": "g.1"}, sessions.place) == (["g.0"], None)
    assert page_of([], [], {"after": "g.0"}, sessions.place) == ([], None)


@pytest.mark.parametrize("place", [None, place_of, SessionList(()).place])
def test_a_name_that_no_list_has_is_refused(place: object) -> None:
    with pytest.raises(UnusableParameter, match="not in the list"):
        page_of(["0:1-2"], ["0:1-2"], {"after": "none"}, place)  # type: ignore[arg-type]
