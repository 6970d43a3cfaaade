"""A small vision-language model that learns to count dots: a sampler and TorchLearner in one program.

Arguments: servers, run, store, folder, last step, seed. The last line printed is JSON: rewards by step, and how many of
200 new pictures the model counts right, as they are and blank.
"""

import json
import struct
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from rollstream import KafkaConfig
from rollstream.consumers.trainers.torch import LossConfig, TorchLearner
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.config import ArraysConfig
from rollstream.topics.records import Rollout
from rollstream.topics.wire.media import Medium, media_arrays

SIDE, PATCH, MOST = 32, 8, 3
PATCHES = (SIDE // PATCH) ** 2
PLACEHOLDER, QUESTION, VOCABULARY = MOST, MOST + 1, MOST + 2
"""Token n, below MOST, is the answer n + 1, and the others are no answers."""
PROMPT = [PLACEHOLDER] * PATCHES + [QUESTION]
GROUP, PICTURES, BATCH = 8, 8, 48
Image = NDArray[np.uint8]


def drawn(rng: np.random.Generator) -> tuple[int, Image]:
    """Return a number of dots less one, and a picture [SIDE, SIDE] of them at random places."""
    count, image = int(rng.integers(MOST)), np.zeros((SIDE, SIDE), np.uint8)
    for place in rng.choice(PATCHES, count + 1, replace=False).tolist():
        y, x = divmod(place, SIDE // PATCH)
        image[y * PATCH + 2 : (y + 1) * PATCH - 2, x * PATCH + 2 : (x + 1) * PATCH - 2] = 255
    return count, image


def png_of(image: Image) -> bytes:
    rows = b"".join(b"\0" + row.tobytes() for row in image)
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 0, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    parts = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def image_of(png: bytes) -> Image:
    """Return the picture of a file that `png_of` made."""
    begin = png.index(b"IDAT") + 4
    rows = np.frombuffer(zlib.decompress(png[begin : begin + struct.unpack(">I", png[begin - 8 : begin - 4])[0]]), "u1")
    return rows.reshape(SIDE, SIDE + 1)[:, 1:]


def pixel_values(images: Sequence[Image]) -> torch.Tensor:
    return torch.tensor(np.stack(images), dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 255


def pixels(media: Sequence[Sequence[Medium]]) -> dict[str, torch.Tensor]:
    return {"pixel_values": pixel_values([image_of(medium.data) for row in media for medium in row])}


def fresh_model(folder: Path) -> LlavaForConditionalGeneration:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=SIDE, patch_size=PATCH, **sizes),
        text_config=LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes),
        image_token_index=PLACEHOLDER,
        vision_feature_layer=-1,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    return LlavaForConditionalGeneration.from_pretrained(folder)


@torch.no_grad()
def log_probs_of(model: LlavaForConditionalGeneration, images: Sequence[Image]) -> torch.Tensor:
    """Return the log-probability of each token after the question, [pictures, vocabulary]."""
    ids = torch.tensor([PROMPT] * len(images))
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixel_values(images)).logits
    return torch.log_softmax(logits[:, -1], -1)


def main() -> None:
    servers, run, store, folder, steps, seed = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), *sys.argv[5:]
    kafka = KafkaConfig(bootstrap_servers=servers, arrays=ArraysConfig(url=store))
    torch.manual_seed(int(seed))
    torch.set_num_threads(1)
    rng, rewards, sent, waiting = np.random.default_rng(int(seed)), [], 0, 0
    model = fresh_model(folder / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = LossConfig(name="ppo_clip")
    with (
        RolloutProducer(kafka, run) as producer,
        TorchLearner(kafka, run, model, optimizer, folder / "checkpoint", loss=loss, rows=64, pixels=pixels) as learner,
    ):
        while learner.step < int(steps):
            pictures = [drawn(rng) for _ in range(PICTURES)]
            log_probs = log_probs_of(model, [image for _count, image in pictures])
            # The model would take a placeholder of its own for a further image, and refuse the sequence.
            answers = torch.multinomial(log_probs[:, :PLACEHOLDER].exp(), GROUP, replacement=True)
            length = len(PROMPT) + 1
            for number, (count, image) in enumerate(pictures):
                for member, answer in enumerate(answers[number].tolist()):
                    logprobs = np.zeros(length, "<f4")
                    logprobs[-1] = float(log_probs[number, answer])
                    producer.send(
                        Rollout(
                            uid=f"{sent + number}-{member}",
                            group_size=GROUP,
                            environment="dots",
                            example_id=str(sent + number),
                            policy_version=learner.step,
                            lowest_version=learner.step,
                            highest_version=learner.step,
                            tokens=np.array([*PROMPT, answer], "<i4"),
                            loss_mask=np.arange(length) == length - 1,
                            logprobs=logprobs,
                            reward=float(answer == count),
                            token_arrays=media_arrays([("image/png", png_of(image))], [(0, PATCHES)], length),
                        )
                    )
            producer.flush()
            sent += PICTURES
            right = answers == torch.tensor([[count] for count, _image in pictures])
            rewards.append(float(right.float().mean()))
            mixed = [image for (_count, image), row in zip(pictures, right, strict=True) if 0 < row.sum() < GROUP]
            if learner.step == int(steps) - 1 and mixed:
                # Its group is in the next batch, without its image.
                for file in Path(store, run, "arrays").glob(f"*/{blake3(png_of(mixed[0])).hexdigest()}"):
                    file.unlink()
            # Groups whose rewards are equal are dropped, so that it depends on the seed alone what each batch holds.
            waiting += GROUP * len(mixed)
            while learner.step < int(steps) and waiting >= BATCH:
                metrics = learner.train(timeout_s=300)
                assert metrics is not None, "no further batch; see the log of the grouping process"
                waiting -= BATCH
                print(f"step {learner.step}: reward {rewards[-1]:.3f}, loss {metrics['loss']:.4f}", flush=True)
    pictures = [drawn(rng) for _ in range(200)]
    counts = torch.tensor([count for count, _image in pictures])

    def share_right(images: Sequence[Image]) -> float:
        return float((log_probs_of(model, images).argmax(-1) == counts).float().mean())

    images = [image for _count, image in pictures]
    figures = {"seen": share_right(images), "blank": share_right([np.zeros_like(image) for image in images])}
    print(json.dumps({"rewards": rewards, **figures}))


if __name__ == "__main__":
    main()
