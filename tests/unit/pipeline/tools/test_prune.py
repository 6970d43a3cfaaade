"""Learners that prune may not read."""

import pytest

from rollstream.pipeline.tools import prune
from rollstream.pipeline.tools.prune import read_positions
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied
from rollstream.topics.kafka import clients, topic_admin


@pytest.mark.parametrize(
    ("owner", "remedy"),
    [("fork", r"grant it READ on both by hand, because no rule of run main does"), ("main", r"^acls apply$")],
)
def test_learners_that_may_not_be_read_are_named_with_a_remedy_that_helps(
    owner: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_arguments: object) -> None:
        raise AccessDenied("acls apply")

    monkeypatch.setattr(clients, "check_broker", lambda _kafka: None)
    monkeypatch.setattr(topic_admin, "bounds", lambda _kafka, _topic: {0: (0, 0)})
    monkeypatch.setattr(prune, "group_names", lambda _kafka: [])
    monkeypatch.setattr(prune, "topic_names", lambda _kafka: [f"{owner}.steps"])
    monkeypatch.setattr(prune, "read_named", denied)
    with pytest.raises(AccessDenied, match=remedy):
        read_positions(KafkaConfig(), "main", "main.grouper")
