"""An evaluation answers the first prompts of a split, whatever class holds them."""

import asyncio
from collections.abc import Sequence

from rollstream.producers.config import WorkerConfig
from rollstream.producers.environment import Prompt, Score, SingleTurn, Split
from rollstream.producers.environment_loading import with_settings
from rollstream.producers.evaluation import Evaluation, evaluate
from rollstream.producers.inference.client import CompletionsClient
from rollstream.topics.records import Rollout
from tests.support.producing import SortingGenerator, serving


class Numbers:
    """A lazy list of four prompts, which knows no slices and has no IndexError at its end."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Prompt:
        assert 0 <= index < 4
        return Prompt(example_id=f"{index}", text=f"{index}1>", answer=f"1{index}")


class Sorting(SingleTurn):
    name, max_tokens = "sorting", 8

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return Numbers()  # type: ignore[return-value]

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        exact = float(response_text == "".join(sorted(prompt.answer)))
        return Score(reward=exact, components={"exact": exact})


class Evals:
    """Keeps the rollouts of evaluations."""

    def __init__(self) -> None:
        self.sent: list[Rollout] = []

    def send(self, rollout: Rollout) -> None:
        self.sent.append(rollout)

    def flush(self) -> None:
        return


def test_the_first_prompts_of_a_lazy_list_are_evaluated() -> None:
    evals = Evals()

    async def evaluated(base_url: str) -> Evaluation:
        environment = with_settings(Sorting(), WorkerConfig())
        async with CompletionsClient([base_url]) as client:
            return await evaluate(environment, client, evals, version=3, phase="end", max_prompts=3)  # type: ignore[arg-type]

    with serving(SortingGenerator(versions=(3,))) as server:
        evaluation = asyncio.run(evaluated(server.base_url))
    assert (evaluation.prompts, evaluation.exact) == (3, 1.0)
    assert [rollout.example_id for rollout in evals.sent] == ["0", "1", "2"]
