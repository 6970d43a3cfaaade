"""An answer as server-sent events, in the form of OpenAI's streams, while the engine decodes it."""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from rollstream.producers.inference.decoding import DecodeResult
from rollstream.producers.inference.dialects.dialect import AnswerHeader, ChoiceStream, Dialect, usage
from rollstream.producers.inference.dialects.fields import error_body
from rollstream.producers.inference.dialects.sampled_choices import GrowingChoice, SampledChoice, choices_of


class EventStream:
    """Writes the choices of one request in parts, which together contain the same data as the whole answer."""

    def __init__(self, http: web.Request, dialect: Dialect[Any], request: Any, header: AnswerHeader) -> None:
        self._http = http
        self._dialect = dialect
        self._request = request
        self._header = header
        sampling = request.sampling
        self._rows = [
            GrowingChoice(index, prompt, sampling.parameters, dialect.tokenizer)
            for index, prompt in enumerate(sampling.row_prompts)
        ]
        self._streams = [ChoiceStream(partial(dialect.token_characters, request)) for _ in self._rows]
        self._loop = asyncio.get_running_loop()
        self._arrivals: asyncio.Queue[tuple[int, Sequence[int], Sequence[float]] | None] = asyncio.Queue()
        self._response: web.StreamResponse | None = None
        self.failure: Exception | None = None
        """The error that ended the answer after a part was written; None if the answer is whole or the client left."""

    def on_tokens(self, row: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Receive new tokens of a row; called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._arrivals.put_nowait, (row, tokens, logprobs))

    async def write(self, decoding: "asyncio.Future[DecodeResult]") -> web.StreamResponse:
        """Write until the engine is done; the request is cancelled if its client disconnects.

        Raises the engine's error if nothing is written yet; else the last event before [DONE] holds the error.
        """
        decoding.add_done_callback(lambda _: self._arrivals.put_nowait(None))
        try:
            await self._write_parts()
            choices = choices_of(self._request.sampling, await decoding, self._dialect.tokenizer)
            for choice in choices:
                await self._advance(choice)
            if self._request.include_usage:
                frame = self._header.fields(self._dialect.stream_kind)
                await self._send({**frame, "choices": [], "usage": usage(self._request.sampling, choices)})
        except ConnectionError:  # the client is gone, so no error can be sent
            assert self._response is not None, "only writing raises it"
            return self._response
        except Exception as error:
            if self._response is None:
                raise
            self.failure = error
            await self._send(error_body(str(error) or repr(error), kind="server_error"))
        finally:
            decoding.cancel()
        assert self._response is not None, "every choice has a last part"
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def _write_parts(self) -> None:
        """Write tokens as they arrive, until the engine is done. The versions and the finish reason are in the last
        part."""
        while (arrival := await self._arrivals.get()) is not None:
            index, tokens, logprobs = arrival
            choice = self._rows[index].add(tokens, logprobs)
            if choice is not None:
                await self._advance(choice)

    async def _advance(self, choice: SampledChoice) -> None:
        part = self._streams[choice.index].advance(choice, self._dialect.visible(self._request, choice))
        if part is None:
            return
        if part.last:
            self._dialect.remember(self._request, choice)
        await self._send(self._dialect.part(self._request, part, self._header))

    async def _send(self, body: dict[str, Any]) -> None:
        if self._response is None:
            self._response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
            self._response.content_type = "text/event-stream"
            await self._response.prepare(self._http)
        await self._response.write(b"data: " + json.dumps(body).encode() + b"\n\n")
