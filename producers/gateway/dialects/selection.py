"""The dialect of each route of model calls, and errors in its form. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from rollstream.producers.episodes.call_sequences import CallSequences
from rollstream.producers.gateway.call_forms import ROUTES, AgentRequest, parse_request, request_digest
from rollstream.producers.gateway.dialects import messages, responses
from rollstream.producers.gateway.dialects.answer_blocks import AnswerStream, ChatForm
from rollstream.producers.json_text import decode
from rollstream.topics.errors import RecordError

COUNT_ROUTE = "messages/count_tokens"


class AgentDialect(NamedTuple):
    """A dialect whose requests become chat requests."""

    prefix: str
    """Beginning of the ids of its answers."""
    chat_request: Callable[[Mapping[str, Any], CallSequences], ChatForm]
    stream: type[AnswerStream]


DIALECTS: Mapping[str, AgentDialect] = {
    "responses": AgentDialect(responses.PREFIX, responses.chat_request, responses.ResponseStream),
    "messages": AgentDialect(messages.PREFIX, messages.chat_request, messages.MessageStream),
}
"""By route below the base URL, the dialects other than those of capture."""
CALL_ROUTES = (*ROUTES, *DIALECTS, COUNT_ROUTE)
"""All routes of model calls below the base URL."""


def agent_request(route: str, body: Any, idempotency_key: str, known: CallSequences) -> AgentRequest:
    """Return a request as capture handles it; `known` are the calls of its session. Raises RecordError, BadRequest."""
    dialect = DIALECTS.get(route)
    if dialect is None:
        return parse_request(route, body, idempotency_key)
    if not isinstance(body, dict):
        raise RecordError("the body must be a JSON object")
    form = dialect.chat_request(body, known)
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if body.get("stream") else {}
    return replace(
        parse_request(
            "chat/completions", {**form.body, **streamed}, digest=request_digest(route, body, idempotency_key)
        ),
        prefix=dialect.prefix,
        notes=form.notes,
    )


def error_in_form(
    path: str, error: Mapping[str, Any] | str, status: int, *, events: int = 0
) -> Mapping[str, Any] | str:
    """Return an error, OpenAI's object or the text of a server's answer, in the form that clients of a path expect;
    after some `events` as an event of their stream."""
    names = path.split("/")
    if "messages" in names:
        return messages.error_body(_inner(error), status)
    return responses.stream_error(_inner(error), events) if events and "responses" in names else error


def _inner(error: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """Return the fields of an error, whether they are nested as OpenAI's or flat as SGLang's."""
    try:
        body = decode(error) if isinstance(error, str) else error
    except (ValueError, RecursionError):
        body = error
    inner = body.get("error", body) if isinstance(body, Mapping) else body
    return inner if isinstance(inner, Mapping) else {"message": str(inner)}
