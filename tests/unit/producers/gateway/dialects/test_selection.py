"""Requests of all dialects are chats to the capture, each with a digest of its own."""

from typing import Any

import pytest

from rollstream.producers.episodes.call_sequences import CallSequences
from rollstream.producers.gateway.call_forms import AgentRequest
from rollstream.producers.gateway.dialects.selection import agent_request, error_in_form
from rollstream.topics.errors import RecordError

BODIES: dict[str, Any] = {
    "chat/completions": {"messages": [{"role": "user", "content": "8+9?"}], "max_tokens": 7},
    "responses": {"input": "8+9?", "max_output_tokens": 7},
    "messages": {"messages": [{"role": "user", "content": "8+9?"}], "max_tokens": 7},
}


def request(route: str, key: str = "", **more: Any) -> AgentRequest:
    return agent_request(route, {**BODIES[route], **more}, key, CallSequences())


def test_a_request_has_one_digest_whole_and_streamed_and_another_in_each_dialect() -> None:
    """Otherwise an agent would get the answer to a request of another dialect, with an id of that one."""
    for route in BODIES:
        whole, streamed = request(route), request(route, stream=True)
        assert (whole.route, whole.streamed, streamed.streamed) == ("chat/completions", False, True)
        assert whole.digest == streamed.digest != request(route, "key").digest
    assert len({request(route).digest for route in BODIES}) == 3
    assert [request(route).prefix for route in BODIES] == ["chatcmpl-", "resp_", "msg_"]
    assert {str(request(route).body) for route in BODIES} == {str(BODIES["messages"])}


@pytest.mark.parametrize("route", ["responses", "messages"])
def test_a_body_that_is_no_object_is_refused(route: str) -> None:
    with pytest.raises(RecordError, match="the body must be a JSON object"):
        agent_request(route, [], "", CallSequences())


@pytest.mark.parametrize(
    "error", ['{"error": {"message": "m"}}', '{"object": "error", "message": "m"}', "m", {"error": {"message": "m"}}]
)
def test_the_error_of_any_server_is_told_in_the_form_of_the_path(error: Any) -> None:
    form = {"type": "error", "error": {"type": "invalid_request_error", "message": "m"}}
    assert error_in_form("/sessions/g.0/v1/messages/count_tokens", error, 400) == form
    assert error_in_form("/sessions/g.0/v1/responses", error, 400) is error
    event = error_in_form("/sessions/g.0/v1/responses", error, 502, events=2)
    assert isinstance(event, dict)
    assert (event["type"], event["sequence_number"], event["message"]) == ("error", 2, "m")
    assert event["error"]["message"] == "m"
