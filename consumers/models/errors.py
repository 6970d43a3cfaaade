"""Errors of the models."""

from rollstream.topics.errors import RollstreamError


class PromptRefused(RollstreamError):
    """A text is outside the tokenizer's vocabulary, or a request does not fit the sampler's shapes."""
