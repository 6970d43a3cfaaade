"""Commit metadata is decoded as it was encoded, and anything else is refused with the remedy."""

import pytest

from rollstream.topics.errors import StateRefused
from rollstream.topics.wire.commit_metadata import CommitMetadata


def test_commit_metadata_is_decoded_as_it_was_encoded() -> None:
    metadata = CommitMetadata(journal=2**40, snapshot=3, oldest=1)
    assert CommitMetadata.decode(metadata.encode(), "here") == metadata
    assert len(metadata.encode()) < 200


@pytest.mark.parametrize("text", [None, "", "{}", "[]", "null", '{"v": 2, "journal": 1, "snapshot": 1, "oldest": 1}'])
def test_metadata_of_another_program_is_refused_with_the_remedy(text: str | None) -> None:
    with pytest.raises(StateRefused, match="rollstream role group recover"):
        CommitMetadata.decode(text, "rollouts[0]")
