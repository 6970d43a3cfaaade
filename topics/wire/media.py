"""Images of a rollout, which are among its `token_arrays`: their names, placeholders, and parts of messages. Pure.

Image n, of 0 to N - 1, is the array `media/n/TYPE`, such as media/0/image/png: |u1 [bytes of the file]. It is in the
record or, where there is a store, an object there. `media_tokens` names the tokens that stand for it, if they are
known. Batches always carry both; the fold and its digests read names only.
"""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from rollstream.topics.errors import RecordError
from rollstream.topics.records.arrays import NamedArray

MEDIA = "media"
"""Name by which readers of batches ask for the bytes of all images."""
MEDIA_TOKENS = "media_tokens"
"""Key, in a rollout's token_arrays, of the number of the image that each token stands for, <i2 [T]; -1 for others."""
_PREFIX = f"{MEDIA}/"
_NAME = re.compile(rf"{_PREFIX}(0|[1-9][0-9]{{0,2}})/([a-z]{{1,16}}/[a-z0-9.+-]{{1,64}})")
_DATA_URL = re.compile(r"data:([a-z]{1,16}/[a-z0-9.+-]{1,64});base64,([A-Za-z0-9+/]+={0,2})")
IMAGE_PARTS = ("image_url", "input_image", "image")
"""Types of the parts of a message that are images."""
_SHOWN = 60


class Medium(NamedTuple):
    """One image of a rollout."""

    number: int
    """Its place among the images of the rollout, from 0."""
    media_type: str
    """Such as image/png."""
    array: NamedArray
    """Its bytes, or the name of their object; `StoredArrays.load` reads one."""
    start: int = -1
    stop: int = -1
    """The tokens that stand for it are within this span; -1 if they are not known."""

    @property
    def data(self) -> bytes:
        """The bytes of the file. Raises RecordError if they were not fetched from the store."""
        return self.array.array().tobytes()

    @property
    def digest(self) -> str:
        """BLAKE3 of the bytes, in hexadecimal."""
        return self.array.stored.rpartition("/")[2] or str(blake3(self.array.data).hexdigest())

    def __str__(self) -> str:
        kind = self.media_type.partition("/")[0]
        return f"[{kind} {self.number + 1} {self.media_type} {self.array.shape[0]:,} B blake3:{self.digest}]"


def is_medium(name: str) -> bool:
    """Whether an array of this name is an image."""
    return name.startswith(_PREFIX)


def media_arrays(
    images: Sequence[tuple[str, bytes]], spans: Sequence[tuple[int, int]] = (), length: int = 0
) -> dict[str, NamedArray]:
    """Return images, each a media type and the bytes of a file, as arrays for the `token_arrays` of a rollout.

    `spans`, if they are known, are the bounds of the tokens that stand for each image, of the `length` of the rollout.
    Raises RecordError for an invalid media type.
    """
    arrays = {}
    for number, (media_type, data) in enumerate(images):
        name = f"{_PREFIX}{number}/{media_type}"
        if not _NAME.fullmatch(name):
            raise RecordError(f"image {number} has the media type {media_type[:_SHOWN]!r}; give one such as image/png")
        arrays[name] = NamedArray(dtype="|u1", shape=(len(data),), data=data)
    if spans:
        tokens = np.full(length, -1, "<i2")
        for number, (start, stop) in enumerate(spans):
            tokens[start:stop] = number
        arrays[MEDIA_TOKENS] = NamedArray.of(tokens)
    return arrays


def media_of(arrays: Mapping[str, NamedArray]) -> tuple[Medium, ...]:
    """Return the images among the arrays of a rollout, in order."""
    named = [(match, name) for name, array in arrays.items() if (match := _NAME.fullmatch(name)) and _is_file(array)]
    if not named:
        return ()
    try:
        tokens = arrays[MEDIA_TOKENS].array() if MEDIA_TOKENS in arrays else np.empty(0, "<i2")
    except RecordError:  # of a rollout that is shown because it is invalid
        tokens = np.empty(0, "<i2")
    media = []
    for match, name in named:
        places = np.flatnonzero(tokens == int(match[1]))
        span = (int(places[0]), int(places[-1]) + 1) if len(places) else (-1, -1)
        media.append(Medium(int(match[1]), match[2], arrays[name], *span))
    return tuple(sorted(media))


def media_problems(arrays: Mapping[str, NamedArray]) -> list[str]:
    """Return what is wrong with the names, types and numbers of the images among the arrays of a rollout."""
    names = [name for name in arrays if is_medium(name)]
    if not names and MEDIA_TOKENS not in arrays:
        return []
    wrong = [name for name in names if not _NAME.fullmatch(name) or not _is_file(arrays[name])]
    if wrong:
        return [f"{wrong[0]} is no image: its name is not media/NUMBER/TYPE, or it is not |u1 of one dimension"]
    numbers = sorted(int(name.split("/")[1]) for name in names)
    if numbers != list(range(len(numbers))):
        return [f"its images have the numbers {numbers} and not 0 to {len(numbers) - 1}"]
    tokens = arrays.get(MEDIA_TOKENS)
    if tokens is not None and (tokens.dtype != "<i2" or len(tokens.shape) != 1):
        return [f"{MEDIA_TOKENS} must be <i2 with one dimension"]
    if tokens is not None and not -1 <= tokens.array().min(initial=-1) <= tokens.array().max(initial=-1) < len(names):
        return [f"{MEDIA_TOKENS} names an image that is not among {len(names)}"]
    return []


def _is_file(array: NamedArray) -> bool:
    return array.dtype == "|u1" and len(array.shape) == 1 and array.shape[0] > 0


def images_in(content: Any) -> list[tuple[str, bytes]]:
    """Return media type and bytes of each image in the content of a message, in order.

    Raises RecordError for an image that is not in the message itself.
    """
    parts = content if isinstance(content, list | tuple) else ()
    return [_image(part) for part in parts if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS]


def sendable(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose parts `image`, with bytes or images of Pillow, are parts `image_url` with data."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    parts = [
        image_part(*_image(part)) if isinstance(part, Mapping) and part.get("type") == "image" else part
        for part in content
    ]
    return {**message, "content": parts}


def image_part(media_type: str, data: bytes) -> dict[str, Any]:
    """Return an image as a part of a message in the format of OpenAI's protocol."""
    return {
        "type": "image_url",
        "image_url": {"url": f"data:{media_type};base64,{base64.b64encode(data).decode()}"},
    }


def _image(part: Mapping[str, Any]) -> tuple[str, bytes]:
    value = part.get("image") if part["type"] == "image" else part.get("image_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    if isinstance(url, str) and (match := _DATA_URL.fullmatch(url)):
        try:
            return match[1], base64.b64decode(match[2])
        except ValueError:
            pass  # refused below
    if isinstance(value, bytes):
        return _type_of(value), value
    if value is not None and hasattr(value, "save"):  # an image of Pillow
        file = io.BytesIO()
        value.save(file, "PNG")
        return "image/png", file.getvalue()
    raise RecordError(
        f"an image of a message is {str(url)[:_SHOWN]!r}, and a record needs its bytes; send it as a URL "
        "data:image/png;base64,..."
    )


_SIGNATURES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}


def _type_of(data: bytes) -> str:
    for signature, media_type in _SIGNATURES.items():
        if data.startswith(signature):
            return media_type
    raise RecordError(f"the bytes of an image begin with {data[:8]!r}; give PNG, JPEG, GIF or WebP")
