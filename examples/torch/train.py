"""A torch policy, trained from a run's batches by a torch optimizer. Arguments: servers, run, steps, checkpoint.

It saves parameters, optimizer and position to one file at every second step. It may be killed at any moment: started
again, it trains on each batch exactly once. Steps after the saved one are repeated, and must match their digests on
record.
"""

import os
import sys
from pathlib import Path

import torch

from rollstream import BatchReader, KafkaConfig, StepWriter

kafka, run, last, path = KafkaConfig(bootstrap_servers=sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)

# The model gives the distribution of a token, given the token before it.
model = torch.nn.Sequential(torch.nn.Embedding(11, 16), torch.nn.Tanh(), torch.nn.Linear(16, 11))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
saved = torch.load(path) if path.exists() else {"step": 0, "position": 0}
if saved["step"]:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def published():
    """Return the logits after each token, which the sampler of docs/examples/produce.py reads."""
    with torch.no_grad():
        return {"logits": model(torch.arange(11)).numpy()}


def save(step, position):
    """Replace the checkpoint as a whole: parameters, optimizer and position belong together."""
    state = {"step": step, "position": position, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


with StepWriter(kafka, run, after_step=saved["step"]) as steps:
    if steps.version < 0:
        steps.publish_version(published(), version=0)
    print(f"continues after step {steps.step}, at offset {saved['position']} of the index", flush=True)
    checkpoint = saved["step"]
    with BatchReader(kafka, run, start=saved["position"]) as reader:
        while steps.step < last:
            read = reader.poll(timeout_s=60)
            if read is None:
                sys.exit("no further batch within a minute")
            losses = []
            for example in read.examples():
                tokens, sampled = torch.tensor(example.tokens), torch.tensor(example.generator_log_probs[1:])
                log_probs = torch.log_softmax(model(tokens[:-1]), -1).gather(1, tokens[1:, None].long())[:, 0]
                ratio, advantage = torch.exp(log_probs - sampled), torch.tensor(example.advantage[1:])
                clipped = torch.minimum(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage)
                losses.append(-(clipped * torch.tensor(example.loss_mask[1:])).sum())
            loss = torch.stack(losses).sum() / read.entry.trained_tokens
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # Write the record before the checkpoint, so that a step in a checkpoint is always on record. Until the save
            # is complete, the program may have to resume from the checkpoint before it.
            steps.record([read], published(), metrics={"loss": float(loss.detach())}, oldest_checkpoint=checkpoint)
            if steps.step % 2 == 0:
                save(steps.step, read.position)
                checkpoint = steps.step
            print(f"step {steps.step}: batch {read.entry.batch_id}, loss {float(loss.detach()):.4f}", flush=True)
