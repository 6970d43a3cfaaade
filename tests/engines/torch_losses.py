"""Runs in an environment with torch and without JAX: losses, gradients and a step of the torch trainer on a batch.

Takes a directory with the checkpoint `model`, the record `batch` and `losses.json`, settings of losses by name. Writes
`results.json`, and for each loss the gradients and the parameters after a step as the checkpoints `NAME-gradient` and
`NAME-step`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rollstream.consumers.learner.objective import LossConfig, denominator_of
from rollstream.consumers.learner.training.packing import sequences_of
from rollstream.consumers.trainers.torch import arrays_of, policy_loss, rows_of, token_log_probs, trained_tokens
from rollstream.topics.records import TrainingBatch
from rollstream.topics.wire.codec import decode_as


def views_are_shared() -> bool:
    """Whether the arrays of tensors are views of their memory, with the same values."""
    tensors = {
        str(dtype): torch.arange(6, dtype=torch.float32).to(dtype).reshape(2, 3)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    arrays = arrays_of(tensors)
    for array in arrays.values():
        array[0, 1] = 7
    return all(float(tensor[0, 1]) == 7 and float(tensor[1, 2]) == 5 for tensor in tensors.values()) and all(
        float(np.float32(array[1, 2])) == 5 for array in arrays.values()
    )


def main() -> None:
    directory = Path(sys.argv[1])
    batch = decode_as(TrainingBatch, (directory / "batch").read_bytes())
    sequences = sequences_of(batch)
    results = {}
    for name, settings in json.loads((directory / "losses.json").read_text()).items():
        config = LossConfig(name=name, **settings)
        model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
        counts = [trained_tokens(sequence, config) for sequence in sequences]
        denominator = sum(counts) if denominator_of(config) == "tokens" else sum(map(bool, counts))
        loss = 0.0
        for begin in range(0, len(sequences), 5):
            rows = rows_of(sequences[begin : begin + 5], config)
            part = policy_loss(*token_log_probs(model, rows), rows, config, float(denominator))
            part.backward()
            loss += float(part.detach())
        named = dict(model.named_parameters())
        gradients = {key: value.grad.clone() for key, value in named.items()}
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for kind, tensors in (("gradient", gradients), ("step", {key: v.detach() for key, v in named.items()})):
            folder = directory / f"{name}-{kind}"
            folder.mkdir()
            save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
        results[name] = {"loss": loss, "norm": norm}
    (directory / "results.json").write_text(json.dumps({"losses": results, "shared": views_are_shared()}))


if __name__ == "__main__":
    main()
