"""The order of prompts: whole epochs over all workers, whatever their number, and a restart that continues."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.flow.prompt_order import PromptOrder

SIZES = st.integers(1, 40)


@given(prompts=SIZES, workers=st.integers(1, 7), epochs=st.integers(1, 3), seed=st.text(max_size=5))
def test_all_workers_together_draw_each_prompt_once_in_every_epoch(
    prompts: int, workers: int, epochs: int, seed: str
) -> None:
    orders = [PromptOrder(prompts, seed=seed, worker=i, workers=workers) for i in range(workers)]
    drawn: list[list[int]] = [[] for _ in range(epochs)]
    for order in orders:
        while order.epoch < epochs:
            drawn[order.epoch].append(order.draw())
    assert [sorted(epoch) for epoch in drawn] == [list(range(prompts))] * epochs


@given(prompts=SIZES, workers=st.integers(1, 4), before=st.integers(0, 60), after=st.integers(0, 60))
def test_an_order_that_goes_on_draws_what_an_uninterrupted_one_would(
    prompts: int, workers: int, before: int, after: int
) -> None:
    whole = PromptOrder(prompts, seed="s", worker=workers - 1, workers=workers)
    expected = [whole.draw() for _ in range(before + after)]
    rest = PromptOrder(prompts, seed="s", worker=workers - 1, workers=workers, drawn=before)
    assert [rest.draw() for _ in range(after)] == expected[before:]
    assert rest.drawn == whole.drawn


def test_the_seed_and_the_epoch_change_the_order() -> None:
    def epoch(seed: str, number: int) -> list[int]:
        order = PromptOrder(50, seed=seed, drawn=50 * number)
        return [order.draw() for _ in range(50)]

    assert len({tuple(epoch(seed, number)) for seed in ("a", "b") for number in (0, 1)}) == 4
    assert epoch("a", 0) == epoch("a", 0)
    assert Counter(epoch("a", 0)) == Counter(epoch("a", 1))
