"""An inference server compiles while it waits for a version, and swaps to versions of its own model only."""

from dataclasses import replace
from typing import Any, cast

import pytest

from rollstream.consumers.models.config import DecoderConfig, LoraConfig, manifest_model
from rollstream.consumers.models.slots import SlotDecoder
from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.roles import infer
from rollstream.pipeline.roles.infer import FollowedPolicy
from rollstream.topics.errors import StateRefused
from rollstream.topics.records import PolicyManifest
from tests.support.checkpoints import random_parameters

MODEL = DecoderConfig(vocab_size=12, hidden_size=8, num_hidden_layers=1, head_dim=4, intermediate_size=12)
OTHER = replace(MODEL, intermediate_size=16)


class Followed:
    """A follower that holds what it is given."""

    def __init__(self) -> None:
        self.manifest: PolicyManifest | None = None
        self.arrays: dict[str, Any] = {}

    def hold(self, version: int, model: DecoderConfig) -> None:
        self.manifest = PolicyManifest(
            version=version, learner="l", step=version, epoch="e", tensors=(), chunks=(), digest="",
            model=manifest_model(model),
        )  # fmt: skip
        self.arrays = random_parameters(model)

    @property
    def version(self) -> int:
        return -1 if self.manifest is None else self.manifest.version

    def get_state(self, version: int) -> tuple[int, dict[str, Any]] | None:
        assert self.manifest is not None
        return None if version == self.manifest.version else (self.manifest.version, self.arrays)


@pytest.mark.parametrize("changed", [{"lora": LoraConfig(rank=2)}, {"rope_theta": 1e6}])
def test_a_version_of_another_model_or_with_other_adapters_is_refused(changed: dict[str, Any]) -> None:
    follower = Followed()
    follower.hold(0, MODEL)
    policy = FollowedPolicy(cast(WeightsFollower, follower), SlotDecoder(MODEL, slots=1, max_model_len=16), ())
    assert policy.refresh() == 0
    follower.hold(1, MODEL)
    assert policy.refresh() == 1
    follower.hold(2, replace(MODEL, **changed))
    with pytest.raises(StateRefused, match="policy version 2 is of another model, or has other adapters"):
        policy.refresh()


@pytest.mark.parametrize(
    ("first", "published", "compiled"),
    [
        (None, MODEL, [MODEL]),
        (None, OTHER, [MODEL, OTHER]),
        (OTHER, OTHER, [OTHER]),
    ],
    ids=["the settings' model", "another model", "a version that is there"],
)
def test_a_server_compiles_for_the_settings_model_while_no_version_is_there(
    first: DecoderConfig | None,
    published: DecoderConfig,
    compiled: list[DecoderConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follower = Followed()
    if first:
        follower.hold(3, first)
    seen: list[DecoderConfig] = []
    warm_up = FollowedPolicy.warm_up

    def compile_for(policy: FollowedPolicy) -> None:
        seen.append(policy.model)
        if published == MODEL:  # Once is enough: it takes seconds.
            warm_up(policy)

    def publish(_follower: object, _timeout_s: float) -> None:
        assert seen or first, "nothing was compiled before the version was waited for"
        follower.hold(3, published)

    monkeypatch.setattr(FollowedPolicy, "warm_up", compile_for)
    monkeypatch.setattr(infer, "wait_for_version", publish)
    config = replace(
        RunConfig(),
        learner=replace(RunConfig().learner, model=MODEL),
        inference=replace(RunConfig().inference, max_rows=1, max_model_len=16),
    )
    policy = infer.prepare(config, CharacterTokenizer(), cast(WeightsFollower, follower))
    assert seen == compiled
    assert policy.model == published
    assert policy.refresh() == 3
