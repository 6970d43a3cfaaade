"""Images among the arrays of a rollout: names, spans, and the parts of messages that they come from."""

import io
import re
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from PIL import Image

from rollstream.topics.errors import RecordError
from rollstream.topics.records import NamedArray
from rollstream.topics.wire.media import (
    MEDIA_TOKENS,
    image_part,
    images_in,
    media_arrays,
    media_of,
    sendable,
)
from rollstream.topics.wire.validation import arrays_problems

PNG, JPEG = b"\x89PNG, not really", b"\xff\xd8\xff"


def test_images_are_named_with_type_size_digest_and_the_span_of_their_placeholders() -> None:
    many = [("image/png", bytes([n])) for n in range(11)]
    assert [medium.data for medium in media_of(media_arrays(many))] == [data for _type, data in many]
    arrays = media_arrays([("image/png", PNG), ("image/jpeg", JPEG)], [(1, 3), (4, 5)], 6)
    assert arrays[MEDIA_TOKENS].array().tolist() == [-1, 0, 0, -1, 1, -1]
    first, second = media_of(arrays)
    assert str(first) == f"[image 1 image/png 16 B blake3:{blake3(PNG).hexdigest()}]"
    assert (second.media_type, second.data, second.start, second.stop) == ("image/jpeg", JPEG, 4, 5)
    assert media_of(media_arrays([("image/png", PNG)]))[0].start == -1
    with pytest.raises(RecordError, match=r"image 0 has the media type 'image/\.\./png'"):
        media_arrays([("image/../png", PNG)])


def bytes_of(*values: int) -> NamedArray:
    return NamedArray.of(np.array(values, "|u1"))


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"media/0/png": bytes_of(1)}, "media/0/png is no image"),
        ({"media/00/image/png": bytes_of(1)}, "media/00/image/png is no image"),
        ({"media/0/image/png": bytes_of()}, "media/0/image/png is no image"),
        ({"media/0/image/png": NamedArray.of(np.zeros(2, "<i4"))}, "or it is not |u1"),
        ({"media/1/image/png": bytes_of(1)}, "numbers [1] and not 0 to 0"),
        ({MEDIA_TOKENS: NamedArray.of(np.zeros(2, "<i4"))}, "must be <i2"),
        ({"media/0/image/png": bytes_of(1), MEDIA_TOKENS: NamedArray.of(np.array([0, 1], "<i2"))}, "not among 1"),
        ({MEDIA_TOKENS: NamedArray.of(np.array([-2, -1], "<i2"))}, "not among 0"),
    ],
)
def test_what_is_no_image_is_named(arrays: dict[str, NamedArray], words: str) -> None:
    assert re.search(re.escape(words), "; ".join(arrays_problems(arrays, 2)))


def test_parts_of_a_message_are_images_whoever_writes_them() -> None:
    url = image_part("image/png", PNG)["image_url"]["url"]
    parts: list[Any] = [
        {"type": "text", "text": "How many dots?"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "input_image", "image_url": url},
        {"type": "image", "image": url},
        {"type": "image", "image": JPEG},
        {"type": "image", "image": Image.new("L", (2, 3), 7)},
    ]
    *images, drawn = images_in(parts)
    assert images == [("image/png", PNG)] * 3 + [("image/jpeg", JPEG)]
    assert Image.open(io.BytesIO(drawn[1])).size == (2, 3)
    assert images_in("How many dots?") == images_in(None) == []
    sent = sendable({"role": "user", "content": parts})
    assert sent["content"][:3] == parts[:3]
    assert {part["type"] for part in sent["content"][3:]} == {"image_url"}
    assert images_in(sent["content"]) == [*images, drawn]


@pytest.mark.parametrize("url", ["https://example.org/cat.png", "data:image/png;base64,a", None, {"url": 3}])
def test_an_image_whose_bytes_are_elsewhere_is_refused(url: object) -> None:
    with pytest.raises(RecordError, match="a record needs its bytes"):
        images_in([{"type": "image_url", "image_url": url}])
