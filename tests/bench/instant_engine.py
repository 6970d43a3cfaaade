"""An inference engine that answers at once, as a process of its own: every request of n samples gets the same answer.

It prints "ready" and its port, and ends when its standard input does.
"""

import asyncio
import json
import sys

from aiohttp import web

PROMPT_TOKENS = (3, 1, 2, 10)
TOKENS = (1, 2, 3, 12)


def answer(n: int) -> bytes:
    """An answer of n choices, each of four tokens."""
    choices = [
        {
            "index": index,
            "text": "123",
            "finish_reason": "stop",
            "logprobs": {"tokens": [str(token) for token in TOKENS], "token_logprobs": [-0.125 * t for t in TOKENS]},
            "token_ids": list(TOKENS),
            "prompt_token_ids": list(PROMPT_TOKENS),
            "lowest_version": 0,
            "highest_version": 0,
        }
        for index in range(n)
    ]
    body = {"id": "x", "object": "text_completion", "created": 0, "model": "policy", "choices": choices}
    return json.dumps({**body, "policy_version": 0, "replica_id": "instant"}).encode()


async def serve() -> None:
    """Listen until standard input is closed."""
    answers: dict[int, bytes] = {}

    async def completions(request: web.Request) -> web.Response:
        n = int((await request.json()).get("n", 1))
        body = answers.setdefault(n, answers.get(n) or answer(n))
        return web.Response(body=body, content_type="application/json")

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "policy_version": 0, "owned_by": "rollstream"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions), web.get("/v1/models", models)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"ready {runner.addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve())
