"""The error a caller of the models gets for input they cannot take."""

from topics.errors import RollstreamError


class PromptRefused(RollstreamError):
    """A text is outside the tokenizer's vocabulary, or a request does not fit the sampler's shapes."""
