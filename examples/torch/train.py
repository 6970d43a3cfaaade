"""A Hugging Face model as the learner of a run, with torch. Arguments: servers, run, model, folder, steps.

Alone, or in several processes: torchrun --nproc-per-node 2 train.py ... Any process may be killed at any moment: once
all are started again, each batch is trained on exactly once.
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM

from rollstream import KafkaConfig, checkpoint_model
from rollstream.consumers.trainers.torch import LossConfig, TorchLearner

kafka, run, directory, folder = KafkaConfig(bootstrap_servers=sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss = LossConfig(name="dapo")
with TorchLearner(
    kafka, run, model, optimizer, folder, loss=loss, save_every=2, description=checkpoint_model(directory)
) as learner:
    print(f"process {learner.process} continues after step {learner.step}", flush=True)
    while learner.step < int(sys.argv[5]):
        metrics = learner.train(timeout_s=600)
        if metrics is None:
            sys.exit("no further batch within ten minutes")
        print(f"process {learner.process}, step {learner.step}: loss {metrics['loss']:.4f}", flush=True)
    learner.save()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
