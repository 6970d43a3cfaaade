"""Coding: the policy writes a function, runs it on examples with a tool, and is rewarded by the hidden tests it passes.

Problems come from a TOML file and are varied by a number. Code of the policy runs in a sandbox, never in this process;
what it returns is compared here, with values that the sandbox never sees.
"""

import asyncio
import json
import math
import random
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rollstream.producers.environments.chat import Chat, Tool, policy_at
from rollstream.producers.environments.environment import Endpoint, Prompt, Score, Split
from rollstream.producers.environments.sandbox import Failure, Limits, Outcome, Sandbox
from rollstream.producers.tasks.task import printable, split_prompts, text_argument
from rollstream.topics.errors import ConfigurationError

_SHIPPED = Path(__file__).with_name("coding_problems.toml")
_EXAMPLES, _HIDDEN = 2, 10
"""Tests that run_tests runs, and tests that decide the reward."""
_ANSWER_CHARACTERS = 2000
_RUNS_KEPT = 4096
_CODE_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
_WORDS = ("a", "an", "at", "bee", "cat", "echo", "fern", "grape", "violet")
_TASK = """{text}

Write a Python function f. Examples:
{examples}

Call run_tests with your code to run it on these examples, and python to run any other code. When you are done, reply
without a call; the code of your last call of run_tests counts, or a block of code in that reply."""
_DRAWN: Mapping[str, Callable[[random.Random], Any]] = {
    "int": lambda r: r.randint(-9, 9),
    "count": lambda r: r.randint(0, 99),
    "ints": lambda r: [r.randint(-9, 9) for _ in range(r.randint(0, 10))],
    "letter": lambda r: r.choice("abc"),
    "text": lambda r: "".join(r.choice("aaabbccz Z,") for _ in range(r.randint(0, 24))),
    "words": lambda r: [r.choice(_WORDS) for _ in range(r.randint(0, 10))],
    "brackets": lambda r: "".join(r.choice(["()", "(())", "((()))x", "(", ")"]) for _ in range(r.randint(0, 4))),
    "moves": lambda r: "".join(r.choice("LRDUx") for _ in range(r.randint(0, 12))),
    "grid": lambda r: [[r.randint(-9, 9) for _ in range(w)] for w in [r.randint(1, 4)] for _ in range(r.randint(1, 4))],
}
"""Draws an argument of each kind."""
_TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
    for name, description in (
        ("run_tests", "Run the function f of this Python code on the examples."),
        ("python", "Run Python code and return what it prints."),
    )
)


class Coding:
    """Write a Python function within `turns` messages; the reward is the share of hidden tests that it passes."""

    def __init__(
        self,
        *,
        name: str = "coding",
        problems: str = "",
        variations: int = 4,
        seed: int = 0,
        turns: int = 4,
        max_tokens: int = 1024,
        temperature: float = 1.0,
        cpu_s: int = 2,
        memory_mb: int = 256,
    ) -> None:
        """`problems` names a TOML file of the same form as coding_problems.toml, the default; its solutions are
        trusted code. Each problem has up to `variations` variations, chosen by `seed`. Every fifth problem is held out
        with all its variations. `cpu_s` and `memory_mb` limit each run of code.
        Raises ConfigurationError for a file without problems, and for an option that is out of bounds.
        """
        if min(variations, turns, cpu_s, memory_mb) < 1:
            raise ConfigurationError(
                f"the environment {name} has variations {variations}, turns {turns}, cpu_s {cpu_s} and memory_mb "
                f"{memory_mb}; each must be at least 1"
            )
        self.name = name
        self.max_tokens = max_tokens
        self._seed, self._turns, self._temperature = seed, turns, temperature
        self._sandbox = Sandbox(Limits(cpu_s=cpu_s, memory_bytes=memory_mb << 20))
        self._runs: dict[tuple[str, str, int], asyncio.Future[Outcome]] = {}
        varied = {
            title: [self._prompt(title, problem, k) for k in _numbers(f"{seed}/{title}", problem["k"], variations)]
            for title, problem in _read(Path(problems) if problems else _SHIPPED).items()
        }
        titles = split_prompts(name, (Prompt(example_id=title, text="") for title in varied))
        self._splits = {s: tuple(p for t in chosen for p in varied[t.example_id]) for s, chosen in titles.items()}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the problems of a split."""
        return self._splits[split]

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        """Let the policy write and run code until it replies without a call or has no turns left; score its last code.

        Raises PolicyUnreachable if the address gives no answer, SandboxFailed if code cannot be run here.
        """
        solution = ""

        async def answer_call(tool: str, arguments: str) -> str:
            nonlocal solution
            try:
                code = text_argument(json.loads(arguments), "code")
            except (ValueError, RecursionError) as error:
                return printable(f"error: {error}")
            if tool == "run_tests":
                solution = code
            return printable((await self.result_of(tool, code, prompt))[:_ANSWER_CHARACTERS])

        tools = [Tool(schema=t, answer=partial(answer_call, t["function"]["name"])) for t in _TOOLS]
        async with policy_at(endpoint, max_tokens=self.max_tokens, temperature=self._temperature) as ask:
            reply = await Chat(ask, tools).until_answer(prompt.text, turns=self._turns)
        blocks = [] if reply.calls else _CODE_BLOCK.findall(reply.text)
        return await self.score(prompt, blocks[-1] if blocks else solution)

    async def result_of(self, tool: str, code: str, prompt: Prompt) -> str:
        """Return the answer of a tool."""
        if tool == "python":
            outcome = await self._sandbox.run(code)
            return f"{outcome.printed.rstrip()}\n{outcome.error}".strip() or "nothing was printed"
        if tool != "run_tests":
            return f"error: there is no tool {tool}"
        calls, expected = self._tests(prompt)
        values = (await self._run(prompt, code, 0)).values
        wrong = [i for i in range(_EXAMPLES) if not same(values[i], expected[i])]
        passed = f"{_EXAMPLES - len(wrong)} of {_EXAMPLES} passed"
        if not wrong:
            return passed
        value = values[wrong[0]]
        returned = value.error if isinstance(value, Failure) else f"returned {value!r}"
        return f"{passed}; {_call_of(calls[wrong[0]])}: {returned}, expected {expected[wrong[0]]!r}"

    async def score(self, prompt: Prompt, solution: str) -> Score:
        """Return the share of hidden tests that a solution passes."""
        values = (await self._run(prompt, solution, _EXAMPLES)).values
        passed = sum(map(same, values, self._tests(prompt)[1][_EXAMPLES:]))
        share = passed / _HIDDEN
        return Score(reward=share, components={"exact": float(passed == _HIDDEN), "passed": share})

    async def _run(self, prompt: Prompt, code: str, first: int) -> Outcome:
        """Run code on the examples (`first` is 0) or on the hidden tests; equal code is run once."""
        key = (prompt.example_id, code, first)
        if key not in self._runs:
            if len(self._runs) >= _RUNS_KEPT:
                self._runs.clear()
            calls = self._tests(prompt)[0]
            calls = calls[_EXAMPLES:] if first else calls[:_EXAMPLES]
            run = self._runs[key] = asyncio.ensure_future(self._sandbox.run(code, "f", calls))
            run.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(self._runs[key])

    def _forget(self, key: tuple[str, str, int], run: asyncio.Future[Outcome]) -> None:
        """Forget a run that failed, so that the next attempt runs the code."""
        if run.cancelled() or run.exception():
            self._runs.pop(key, None)

    def _tests(self, prompt: Prompt) -> tuple[list[list[Any]], list[Any]]:
        """Return the arguments and the right values of a problem's tests, the examples first."""
        return _tests_of(f"{self._seed}/{prompt.example_id}", prompt.extra["arguments"], prompt.answer)

    def _prompt(self, title: str, problem: Mapping[str, Any], k: int) -> Prompt:
        text, solution = (problem[part].strip().replace("{k}", str(k)) for part in ("text", "solution"))
        prompt = Prompt(
            example_id=f"{title}/{k}",
            text=text,
            answer=solution,
            extra={"arguments": " ".join(problem["arguments"])},
        )
        calls, expected = self._tests(prompt)
        examples = (f"{_call_of(calls[i])} returns {expected[i]!r}" for i in range(_EXAMPLES))
        return replace(prompt, text=_TASK.format(text=text, examples="\n".join(examples)))


@lru_cache(maxsize=1024)
def _tests_of(seed: str, kinds: str, solution: str) -> tuple[list[list[Any]], list[Any]]:
    generator = random.Random(seed)
    calls = [[_DRAWN[kind](generator) for kind in kinds.split()] for _ in range(_EXAMPLES + _HIDDEN)]
    names: dict[str, Any] = {}
    exec(solution, names)
    # Through JSON, as the values of the policy's code: copies of the arguments, and lists for tuples.
    return calls, [json.loads(json.dumps(names["f"](*json.loads(json.dumps(arguments))))) for arguments in calls]


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the problems of a file by title. Raises ConfigurationError, naming the file and the problem."""
    try:
        problems = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot read the problems of {path}: {error}; name a TOML file of the same form as {_SHIPPED}"
        ) from error
    for title, problem in problems.items():
        try:
            kinds, (low, high) = problem["arguments"], problem["k"]
            unknown = [kind for kind in kinds if kind not in _DRAWN]
            if not unknown and low <= high and isinstance(problem["text"] + problem["solution"], str):
                continue
            fault = f"its arguments are {kinds} and k is {[low, high]}"
        except (KeyError, TypeError, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
        raise ConfigurationError(
            f"{path}, problem {title}: {fault}; give text, solution, k = [lowest, highest], and arguments of the kinds "
            f"{', '.join(_DRAWN)}"
        )
    return problems


def _numbers(seed: str, bounds: Sequence[int], count: int) -> list[int]:
    numbers = range(bounds[0], bounds[1] + 1)
    return sorted(random.Random(seed).sample(numbers, min(count, len(numbers))))


def _call_of(arguments: Sequence[Any]) -> str:
    return f"f({', '.join(map(repr, arguments))})"


def same(value: object, expected: object) -> bool:
    """Return whether two values of JSON are equal: 1 is not true, and floats are equal within a billionth."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in expected)
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, float) and isinstance(expected, int | float):
        return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-9)
    return value == expected
