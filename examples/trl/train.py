"""TRL's GRPO trainer as the learner of a run. Arguments: servers, run, model directory, rows of a batch, steps, output.

Nothing is sampled here: the trainer takes the batches of the run. Alone, or in several processes: torchrun
--nproc-per-node 2 train.py ... Any process may be killed at any moment: once all are started again, each batch is
trained on exactly once.
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from rollstream import KafkaConfig, checkpoint_model
from rollstream.consumers.trainers.trl import LogBatches, log_trainer

kafka, run, directory, output = KafkaConfig(bootstrap_servers=sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[6]
rows, last = int(sys.argv[4]), int(sys.argv[5])
process, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Told(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        print(f"process {process}, step {state.global_step}", flush=True)


model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
batches = LogBatches(
    kafka, run, model, output, process=process, processes=processes, description=checkpoint_model(directory)
)
print(f"process {process} continues after step {batches.step}, at offset {batches.position} of the index", flush=True)
trainer = log_trainer(
    batches,
    model=model,
    processing_class=AutoTokenizer.from_pretrained(directory),
    callbacks=[Told()],
    args=GRPOConfig(
        output_dir=output,
        per_device_train_batch_size=rows,
        num_generations=rows,
        max_steps=last,
        learning_rate=1e-3,
        loss_type="dapo",
        save_steps=2,
        logging_steps=1,
        ignore_data_skip=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    ),
)
trainer.train(resume_from_checkpoint=None if batches.checkpoint is None else str(batches.checkpoint))
