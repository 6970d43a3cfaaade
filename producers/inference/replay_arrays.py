"""What a learner replays of sampling, as engines answer it and as rollouts carry it. Pure.

Experts: vLLM and rollstream answer `routed_experts` as an .npy file in base64, [prompt + answer - 1, layers, experts of
each]; older releases of vLLM leave out the prompt, or answer it apart. SGLang answers the int32 numbers alone, in
base64. The last token has no experts, because it is computed only with a next one.

Sampling masks: a list of the tokens that top_p, top_k and min_p kept, for each token of the answer.
"""

import base64
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_NPY = b"\x93NUMPY"
_NUMBERS_LIMIT = 2**16 - 1
"""No expert has this number or a larger one: the largest value of a dtype stands for an unknown expert."""


def experts_of(value: Any, prompt: int, answer: int, *, prompt_value: Any = None) -> NDArray[Any] | None:
    """Return the experts of the P tokens of a prompt and the N tokens of its answer; None if `value` is None.

    They are numbers [P + N, layers, experts of a token], or [P + N, their product], of |u1 or <u2; a row of the largest
    value of the dtype is unknown. `prompt_value` holds those of the prompt if they were answered apart. Raises
    ValueError if they are not integers of at least 0, or not for these numbers of tokens.
    """
    if value is None:
        return None
    length, start = prompt + answer, 0
    rows = _decoded(value, length - 1)
    if len(rows) in (answer - 1, answer) and len(rows) < length - 1:
        before = None if prompt_value is None else _decoded(prompt_value, prompt)
        if before is not None and before.shape == (prompt, *rows.shape[1:]):
            rows = np.concatenate([before, rows])
        else:
            start = prompt
    elif len(rows) not in (length - 1, length):
        raise ValueError(f"routed_experts has {len(rows)} rows for {prompt} tokens of a prompt and {answer} sampled")
    return _placed(rows[: length - 1 - start], start, length)


def joined_experts(replies: Sequence[NDArray[Any] | None], length: int) -> NDArray[Any] | None:
    """Return the experts [T, ...] of an episode of `length` tokens; None if no reply has experts.

    The prompt of each reply begins with all tokens before it. A token keeps the experts by which it was computed first,
    when it was sampled.
    """
    arrays = [reply for reply in replies if reply is not None]
    if not arrays:
        return None
    dtype = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
    experts = _unknown((length, *arrays[0].shape[1:]), dtype)
    done = 0
    for array in arrays:
        if array.shape[1:] == experts.shape[1:]:
            known = is_known(array[done:])
            experts[done : len(array)][known] = array[done:][known]
            # The last token of a reply is computed with the next reply.
            done = len(array) - 1
    return experts


class SamplingMask(NamedTuple):
    """Tokens among which each of N tokens was drawn."""

    counts: NDArray[np.int32]
    """Their number for each token, [N]."""
    tokens: NDArray[np.int32]
    """These tokens, those of the first token first."""


def mask_of(value: Any, tokens: NDArray[np.int32]) -> SamplingMask | None:
    """Return the mask of the N `tokens` of an answer; None if `value` is None, or if some token has no kept tokens.

    Raises ValueError if it is not a list of token ids for each token, among which is the token itself.
    """
    if value is None or not all(value):
        return None
    counts = np.array([len(each) for each in value], "<i4")
    kept = np.array([token for each in value for token in each])
    valid = len(counts) == len(tokens) and kept.ndim == 1 and (not kept.size or kept.dtype.kind in "iu")
    if not valid or kept.min(initial=0) < 0 or kept.max(initial=0) > np.iinfo(np.int32).max:
        raise ValueError(f"sampling_mask is not a list of token ids for each of {len(tokens)} tokens")
    owners = np.repeat(np.arange(len(tokens)), counts)
    present = np.zeros(len(tokens), bool)
    present[owners[kept == np.asarray(tokens)[owners]]] = True
    if not present.all():
        raise ValueError("sampling_mask lacks a token that was sampled")
    return SamplingMask(counts, kept.astype("<i4"))


def joined_masks(replies: Sequence[tuple[int, SamplingMask | None]], length: int) -> SamplingMask | None:
    """Return the mask of an episode of `length` tokens from those of its replies, each with the position of its first
    sampled token; other tokens have no kept tokens. None if a reply has no mask."""
    counts = np.zeros(length, "<i4")
    parts = []
    for start, mask in replies:
        if mask is None:
            return None
        counts[start : start + len(mask.counts)] = mask.counts
        parts.append(mask.tokens)
    return SamplingMask(counts, np.concatenate(parts) if parts else np.empty(0, "<i4"))


def is_known(experts: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether the experts of each token are known, [T]."""
    known: NDArray[np.bool_] = (experts != np.iinfo(experts.dtype).max).all(axis=tuple(range(1, experts.ndim)))
    return known


def _placed(rows: NDArray[Any], start: int, length: int) -> NDArray[Any]:
    highest = int(rows.max(initial=0))
    if rows.min(initial=0) < 0 or highest >= _NUMBERS_LIMIT:
        raise ValueError(f"routed_experts holds numbers outside 0 to {_NUMBERS_LIMIT - 1}")
    experts = _unknown((length, *rows.shape[1:]), np.dtype("|u1" if highest < 255 else "<u2"))
    experts[start : start + len(rows)] = rows
    return experts


def _unknown(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.full(shape, np.iinfo(dtype).max, dtype)


def _decoded(value: Any, rows: int) -> NDArray[Any]:
    data = base64.b64decode(value, validate=True)
    if data.startswith(_NPY):
        # np.load would allocate as much as the header says before it reads.
        file = io.BytesIO(data)
        np.lib.format.read_magic(file)
        shape, in_columns, dtype = np.lib.format.read_array_header_1_0(file)
        begin = file.tell()
    else:
        shape, in_columns, dtype, begin = (rows, -1), False, np.dtype("<i4"), 0
    if dtype.kind not in "iu" or in_columns or len(shape) not in (2, 3) or 0 in shape[1:]:
        raise ValueError(f"routed_experts is an array of shape {shape} and dtype {dtype}")
    return np.frombuffer(data, dtype, offset=begin).reshape(shape)
