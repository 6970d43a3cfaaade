"""Tool use: questions that a policy answers with a calculator and a SQLite database, through OpenAI's tool calls.

Like any other agent, the agent here knows an address, a key and a model, and nothing of tokens, groups or versions.
"""

import ast
import json
import operator
import random
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from rollstream.producers.environments.chat import DIALECTS, Chat, Dialect, Tool, policy_at
from rollstream.producers.environments.environment import Conversation, Endpoint, Prompt, Score, Split
from rollstream.producers.tasks.task import checked_share, printable, split_prompts, text_argument
from rollstream.topics.errors import ConfigurationError

Kind = Literal["calculator", "database"]
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_LONGEST_EXPRESSION = 64
_DATABASE_STEPS = 10_000
"""Instructions of SQLite's virtual machine that a query may execute: enough for the table, too few to hang a worker."""
_TEXT_BYTES = 10_000
"""Largest text that a query may make; a function such as printf makes a large one in a single instruction."""
_ROWS = 10
_CALC: dict[str, Any] = {
    "type": "function",
    "function": {"name": "calc", "parameters": {"type": "object", "properties": {"e": {"type": "string"}}}},
}
_SQL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "sql", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}
_GOODS = ("fig", "kiwi", "lime", "nut", "oat", "pear", "plum", "rice", "salt", "tea")


class ToolUse:
    """Sums of two numbers (calculator), prices in a table `goods` (database), or both.

    Half of the reward is for a tool call whose result is the right answer, half for giving that answer at the end.
    """

    def __init__(
        self,
        *,
        name: str = "tools",
        kinds: Sequence[Kind] = ("calculator",),
        operands: Sequence[int] = (10, 99),
        described: bool = True,
        turns: int = 3,
        max_tokens: int = 96,
        temperature: float = 1.0,
        seed: int = 0,
        demonstrated: float = 0.0,
        dialect: Dialect = "chat",
    ) -> None:
        """`turns` limits the messages of the policy in an episode, and `operands` the numbers of a sum. Without
        `described`, the policy is told the names of the tools but not their arguments, which makes prompts shorter.
        `demonstrated` is the share of warm-start conversations that are right; `dialect` is the protocol in which
        the policy is asked. Raises ConfigurationError for an unknown kind or dialect, limits that allow no number, or a
        share that is not from 0 to 1.
        """
        if not kinds or set(kinds) - {"calculator", "database"} or turns < 1:
            raise ConfigurationError(
                f"the environment {name} has kinds {list(kinds)} and turns {turns}; kinds must be calculator, "
                "database or both, and turns at least 1"
            )
        if len(operands) != 2 or not 0 <= operands[0] < operands[1]:
            raise ConfigurationError(
                f"the environment {name} has operands {list(operands)}; give the lowest and the highest number of a "
                "sum, not below 0, e.g. [10, 99]"
            )
        if dialect not in DIALECTS:
            raise ConfigurationError(f"the environment {name} has dialect {dialect}; use {' or '.join(DIALECTS)}")
        self.name = name
        self._dialect: Dialect = dialect
        self.max_tokens = max_tokens
        self.demonstrated = checked_share(name, demonstrated)
        self._turns = turns
        self._temperature = temperature
        generator = random.Random(seed)
        self._prices = {good: generator.randrange(10, 100) for good in _GOODS}
        tools = [tool for tool, kind in ((_CALC, "calculator"), (_SQL, "database")) if kind in kinds]
        self._tools = tools if described else [_nameless(tool) for tool in tools]
        self._splits = split_prompts(name, self._questions(kinds, range(operands[0], operands[1] + 1)))

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the questions of a split, such as `17+25=` or `price of tea?`."""
        return self._splits[split]

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        """Ask the question and answer tool calls until the policy answers without a call or has no turns left.

        Raises PolicyUnreachable if the address gives no answer.
        """
        helped = False

        async def answer_call(tool: str, arguments: str) -> str:
            nonlocal helped
            result = self.result_of(tool, arguments)
            helped = helped or result == prompt.answer
            return result

        tools = [Tool(schema=t, answer=partial(answer_call, t["function"]["name"])) for t in self._tools]
        policy = policy_at(endpoint, max_tokens=self.max_tokens, dialect=self._dialect, temperature=self._temperature)
        async with policy as ask:
            reply = await Chat(ask, tools).until_answer(prompt.text, turns=self._turns)
        exact = not reply.calls and reply.text.strip() == prompt.answer
        return Score(reward=(helped + exact) / 2, components={"exact": float(exact), "helped": float(helped)})

    def result_of(self, tool: str, arguments: str) -> str:
        """Return the answer of a tool, in printable ASCII; an error is an answer that begins with `error`."""
        return printable(self._answer_of(tool, arguments))

    def _answer_of(self, tool: str, arguments: str) -> str:
        try:
            given = json.loads(arguments)
            if tool == "calc":
                return str(_value(ast.parse(text_argument(given, "e")[:_LONGEST_EXPRESSION], mode="eval").body))
            if tool == "sql":
                return self._rows(text_argument(given, "q"))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, sqlite3.Error) as error:
            return f"error: {error}"
        return f"error: there is no tool {tool}"

    def warm_start_conversations(self, seed: int, n: int) -> list[Conversation]:
        """Return `n` conversations that teach the format of a call and of an answer.

        The calls and answers belong to other questions, except in a share `demonstrated` of them.
        """
        generator = random.Random(seed)
        conversations = []
        for number in range(n):
            question, other, third = generator.choices(self._splits["train"], k=3)
            if generator.random() < self.demonstrated:
                other = third = question
            messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
            turn = call_text(other)
            if number % 2:
                name, arguments = other.extra["tool"], other.extra["arguments"]
                call = {"id": "call-0", "type": "function", "function": {"name": name, "arguments": arguments}}
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append({"role": "tool", "tool_call_id": "call-0", "content": other.answer})
                turn = third.answer
            conversations.append(Conversation(messages=messages, tools=self._tools, turn=turn))
        return conversations

    def _questions(self, kinds: Sequence[Kind], operands: Sequence[int]) -> list[Prompt]:
        questions = []
        if "calculator" in kinds:
            for a in operands:
                questions += [_prompt(f"{a}+{b}=", str(a + b), "calc", e=f"{a}+{b}") for b in operands]
        if "database" in kinds:
            for good, price in self._prices.items():
                query = f"select price from goods where name='{good}'"
                questions.append(_prompt(f"price of {good}?", str(price), "sql", q=query))
        return questions

    def _rows(self, query: str) -> str:
        """Run a query on a new table, which is deleted afterwards."""
        database = sqlite3.connect(":memory:")
        try:
            database.execute("create table goods (name text, price integer)")
            database.executemany("insert into goods values (?, ?)", self._prices.items())
            database.execute("pragma query_only = on")
            database.set_authorizer(_allow_reading)
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _TEXT_BYTES)
            database.set_progress_handler(lambda: 1, _DATABASE_STEPS)
            rows = database.execute(query).fetchmany(_ROWS)
        finally:
            database.close()
        return "\n".join(" ".join(str(value) for value in row) for row in rows)


def call_text(question: Prompt) -> str:
    """Return the right call for a question, as a model writes it in the format of Hermes."""
    return f'<tool_call>{{"name": "{question.extra["tool"]}", "arguments": {question.extra["arguments"]}}}</tool_call>'


def _nameless(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool without its parameters, which are optional in OpenAI's protocol."""
    return {"type": tool["type"], "function": {"name": tool["function"]["name"]}}


def _prompt(text: str, answer: str, tool: str, **arguments: str) -> Prompt:
    return Prompt(example_id=text, text=text, answer=answer, extra={"tool": tool, "arguments": json.dumps(arguments)})


def _value(node: ast.expr) -> int:
    """Value of an expression of integers, +, - and *. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only integers, +, - and * are allowed")


def _allow_reading(action: int, *_details: str | None) -> int:
    allowed = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY
