"""An address that speaks OpenAI's protocol and gives a script's messages, for environments that call the policy."""

import asyncio
import json
from typing import Any

from aiohttp import web

from rollstream.producers.environments.environment import AgentEnvironment, Endpoint, Prompt, Score


def play(environment: AgentEnvironment, prompt: Prompt, *answers: Any) -> tuple[Score, list[dict[str, Any]]]:
    """Play one episode against these messages, or statuses and texts, in turn; returns the requests, too."""
    requests: list[dict[str, Any]] = []

    async def run() -> Score:
        script = iter(answers)

        async def answer(request: web.Request) -> web.Response:
            assert request.headers["Authorization"] == "Bearer key"
            requests.append(await request.json())
            assert requests[-1]["messages"][0] == {"role": "user", "content": prompt.text}
            step = next(script)
            if isinstance(step, tuple):
                return web.Response(status=step[0], text=step[1])
            return web.json_response({"choices": [{"message": {"role": "assistant", **step}}]})

        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            return await environment.play(prompt, Endpoint(base_url=url, api_key="key", model="policy"))
        finally:
            await runner.cleanup()

    return asyncio.run(run()), requests


def call(tool: str, **arguments: str) -> dict[str, Any]:
    """A message that calls a tool."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
