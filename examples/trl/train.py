"""TRL's GRPO trainer as the learner of a run. Arguments: servers, run, model directory, rows of a batch, steps, output.

The rollout function takes the next batch of the run; nothing is sampled here. The program may be killed at any moment:
started again, it trains on each batch exactly once, because a step goes on record before a checkpoint of TRL can name
it, and the step in the newest checkpoint tells where in the index to continue.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainerState
from trl import GRPOConfig, GRPOTrainer

from rollstream import BatchReader, KafkaConfig, StepWriter, checkpoint_model

kafka, run, directory, output = KafkaConfig(bootstrap_servers=sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[6])
rows, last = int(sys.argv[4]), int(sys.argv[5])


def newest_checkpoint():
    """Return the folder and the step of the newest complete checkpoint: TRL writes the trainer's state last."""
    for folder in sorted(output.glob("checkpoint-*"), key=lambda folder: -int(folder.name.rpartition("-")[2])):
        try:
            return folder, TrainerState.load_from_json(str(folder / "trainer_state.json")).global_step
        except (OSError, ValueError):
            print(f"{folder} is incomplete")
    return None, 0


def published(model):
    """Return the parameters under the names that inference servers know."""
    return {name: parameter.detach().float().cpu().numpy() for name, parameter in model.named_parameters()}


class Batches(TrainerCallback):
    """Passes the batches of the run to TRL as rollouts, and puts TRL's steps on record."""

    def __init__(self, steps, reader):
        self.steps, self.reader, self.read = steps, reader, None

    def rollouts(self, prompts, _trainer):
        """Return the rows of the next batch, and add rows without a trained token if TRL needs more."""
        self.read = self.reader.poll(timeout_s=600)
        if self.read is None:
            sys.exit("no further batch within ten minutes")
        examples = self.read.examples()
        if len(examples) > len(prompts):
            sys.exit(
                f"batch {self.read.entry.batch_id} has {len(examples)} rows: give this number as the fourth argument"
            )
        rewards, mask = self.read.batch.rewards.tolist(), [example.loss_mask.copy() for example in examples]
        for _ in range(len(prompts) - len(examples)):
            examples, rewards, mask = [*examples, examples[0]], [*rewards, rewards[0]], [*mask, mask[0] & False]
        begins = [max(1, int(example.loss_mask.argmax())) for example in examples]
        return {
            "prompt_ids": [e.tokens[:begin].tolist() for e, begin in zip(examples, begins, strict=True)],
            "completion_ids": [e.tokens[begin:].tolist() for e, begin in zip(examples, begins, strict=True)],
            "logprobs": [e.generator_log_probs[begin:].tolist() for e, begin in zip(examples, begins, strict=True)],
            "env_mask": [m[begin:].astype(int).tolist() for m, begin in zip(mask, begins, strict=True)],
            "recorded_reward": rewards,
            "advantage": [float(e.advantage[begin]) for e, begin in zip(examples, begins, strict=True)],
        }

    def on_step_end(self, args, state, _control, model, **_kwargs):
        """Put the step on record before TRL saves it; return nothing, so that TRL's control flow stays as it is."""
        # If TRL saves this step, the program may have to resume from the checkpoint before it until that is complete.
        complete = state.global_step - 1 - (state.global_step - 1) % args.save_steps
        self.steps.record([self.read], published(model), oldest_checkpoint=complete)
        print(f"step {self.steps.step}: batch {self.read.entry.batch_id}", flush=True)


class LogTrainer(GRPOTrainer):
    """GRPO with the advantages on the log, computed over whole groups, and ratios to the sampling probabilities."""

    def _generate_and_score_completions(self, inputs):
        scored = super()._generate_and_score_completions(inputs)
        advantages = [row["advantage"] for row in inputs]
        scored["advantages"] = torch.tensor(advantages, device=scored["advantages"].device)
        scored["old_per_token_logps"] = scored["sampling_per_token_logps"]
        return scored


def recorded_reward(recorded_reward, **_kwargs):
    """Return the rewards on record, from which TRL computes its metrics."""
    return recorded_reward


checkpoint, step = newest_checkpoint()
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
with StepWriter(kafka, run, after_step=step, model=checkpoint_model(directory)) as steps:
    if steps.version < 0:
        steps.publish_version(published(model), version=0)
    print(f"continues after step {steps.step}, at offset {steps.position} of the index", flush=True)
    with BatchReader(kafka, run, start=steps.position) as reader:
        batches = Batches(steps, reader)
        trainer = LogTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(directory),
            args=GRPOConfig(
                output_dir=str(output),
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
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            reward_funcs=recorded_reward,
            rollout_func=batches.rollouts,
            callbacks=[batches],
        )
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
