"""The list of mutants keeps up with the code."""

from tests.mutants import MUTANTS


def test_each_mutant_has_a_name_of_its_own_and_its_text_once_in_the_code() -> None:
    assert [mutant.problem for mutant in MUTANTS if mutant.problem] == []
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.old != mutant.new for mutant in MUTANTS)
