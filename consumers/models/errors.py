"""The errors a caller of the models gets for what they cannot take."""

from topics.errors import RollstreamError


class PromptRefused(RollstreamError):
    """A text is outside the tokenizer's vocabulary, or a request does not fit the sampler's shapes."""


class CheckpointRefused(RollstreamError):
    """The files of a Hugging Face checkpoint are incomplete, damaged, or not of the model their config.json says."""
