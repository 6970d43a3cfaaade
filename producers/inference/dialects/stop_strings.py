"""Search for the first stop string in the text of sampled tokens, with few decodes, because each takes milliseconds.

Further tokens are assumed only to add to a text, except to an incomplete character at its end. A tokenizer with byte
tokens also shows complete characters next to an incomplete one as U+FFFD. A stop with U+FFFD may be found late.
"""

from collections.abc import Sequence

from rollstream.producers.inference.token_codec import TokenCodec

UNKNOWN_CHARACTER = "\ufffd"
"""Text of a character whose tokens are incomplete."""
_CHARACTER_BYTES = 4
"""Bytes of the longest character in UTF-8; a token has at least one byte."""


def contains_stop(text: str, stops: Sequence[str]) -> bool:
    """Whether a stop is in a text."""
    return any(stop in text for stop in stops)


def stopped_length(tokens: Sequence[int], stops: Sequence[str], tokenizer: TokenCodec) -> int:
    """Return the number of tokens up to the one that completes the first stop. The text of `tokens` contains a stop.

    The search begins at the end, because the engine ends a row soon after its stop.
    """
    # At length `none` the text contains no stop, and at length `some` it does.
    none, some, step = 0, len(tokens), 1
    while some - none > 1:
        middle = max((none + some) // 2, some - step)
        if length := _settled_length(tokens, none, middle, stops, tokenizer):
            some, step = length, 2 * step
        else:
            none = middle
    return some


def _settled_length(tokens: Sequence[int], none: int, length: int, stops: Sequence[str], tokenizer: TokenCodec) -> int:
    """Return the largest length up to `length` at which the text contains a stop; 0 if no earlier text does.

    An incomplete character at the end of a text may hide a stop before it, so the text without that character decides.
    """
    for count in range(length, max(none, length - _CHARACTER_BYTES), -1):
        text = tokenizer.decode(tokens[:count])
        if contains_stop(text, stops):
            return count
        if not text.endswith(UNKNOWN_CHARACTER):
            break
    return 0


def has_new_stop(tokens: Sequence[int], new: int, stops: Sequence[str], tokenizer: TokenCodec) -> bool:
    """Whether the text of `tokens` contains a stop, if it contained none before the last `new` tokens.

    Decodes only as many tokens as a stop among the new ones may have, unless an incomplete character may have hidden a
    stop. If some of them have no text, a stop may be missed; the answer is cut at it once it is complete.
    """
    before = len(tokens) - new
    start = max(0, before - _CHARACTER_BYTES * (max(map(len, stops)) + 1))  # it may begin within a character
    hidden = tokenizer.decode(tokens[start:before]).endswith(UNKNOWN_CHARACTER)
    # A token may have another text at the beginning than elsewhere, so the whole text decides.
    return (hidden or contains_stop(tokenizer.decode(tokens[start:]), stops)) and contains_stop(
        tokenizer.decode(tokens), stops
    )
