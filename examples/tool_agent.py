"""An agent that answers sums with a calculator, and the loop that lets a run train the model behind it.

`answer` is the agent: OpenAI's client, an address and a tool. `episode` gives the agent the address of a session at the
gateway of a run, and sends the reward to the gateway. Nothing here imports rollstream.

    rollstream run --config recipes/tools/run.toml --set gateway.port=8100 --set supervisor.workers=0
    python examples/tool_agent.py http://127.0.0.1:8100

The program ends when the run does.
"""

import asyncio
import json
import random
import sys
from typing import Any

import httpx
import openai

GROUPS = 4
"""Number of groups that are played at the same time."""
EPISODES = 8
"""Number of episodes in a group, whose rewards are compared."""
CALCULATOR: Any = {"type": "function", "function": {"name": "calc"}}


def calculate(arguments: str) -> str:
    """Return the value of a sum such as {"e": "1+2"}, or an error for the model to read."""
    try:
        first, second = json.loads(arguments)["e"].split("+")
        return str(int(first) + int(second))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}"


async def answer(client: openai.AsyncOpenAI, question: str) -> tuple[str, list[str]]:
    """Return the model's answer, empty if it gave none within two turns, and the results of its calls."""
    messages: list[Any] = [{"role": "user", "content": question}]
    results: list[str] = []
    for _turn in range(2):
        completion = await client.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATOR], max_tokens=72
        )
        message: Any = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return (message.content or "").strip(), results
        for call in message.tool_calls:
            results.append(calculate(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": results[-1]})
    return "", results


async def episode(http: httpx.AsyncClient, client: openai.AsyncOpenAI, session: dict[str, str], question: str) -> None:
    """Play one episode; half of its reward is for a call with the right result, half for the right answer."""
    right = str(sum(map(int, question.removesuffix("=").split("+"))))
    agent = client.with_options(base_url=session["base_url"], api_key=session["api_key"])
    try:
        text, results = await answer(agent, question)
    except openai.APIError:
        text, results = "", []  # The conversation is too long for the model, or the run is over.
    helped, exact = float(right in results), float(text == right)
    name = session["session_id"]
    await rl(http, "set_reward", session_id=name, reward=(helped + exact) / 2, components={"exact": exact})
    await rl(http, "end_session", session_id=name)


async def groups(http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
    """Play groups, one after the other, until the run is over."""
    while True:
        question = f"{random.randint(1, 4)}+{random.randint(1, 4)}="
        group = await rl(http, "start_session", task_id=question, environment="tools", group_size=EPISODES)
        if group is None:
            return
        await asyncio.gather(*(episode(http, client, session, question) for session in group["sessions"]))


async def rl(http: httpx.AsyncClient, path: str, **fields: object) -> Any:
    """Ask the gateway until it no longer says to wait, and return its answer; None once the run is over."""
    while True:
        try:
            response = await http.post(f"/rl/{path}", json=fields)
        except httpx.HTTPError:
            return None
        if response.status_code not in (429, 503):
            return response.json() if response.is_success else None
        await asyncio.sleep(float(response.headers.get("Retry-After", 1)))


async def main(url: str) -> None:
    """Play at the gateway with this address."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=300) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="of a session") as client,
    ):
        await asyncio.gather(*(groups(http, client) for _ in range(GROUPS)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
