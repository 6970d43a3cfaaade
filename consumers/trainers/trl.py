"""TRL's GRPO trainer as the learner of a run: its rollouts are the run's batches, and its steps are on the log.

Delivery: each batch is trained on once, whatever is killed. A step goes on record before a checkpoint of TRL can name
it, and the step in TRL's newest whole checkpoint tells where in the index to continue.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerState
from trl import GRPOTrainer

from rollstream.consumers.batch_reader import BatchReader, ReadBatch
from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.consumers.trainers.torch import arrays_of
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.step_log import read_steps
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded
from rollstream.topics.wire.rl_examples import SAMPLING_MASK


def newest_checkpoint(output: str | Path) -> tuple[Path | None, int]:
    """Return the folder and the step of TRL's newest whole checkpoint, None and 0 if there is none.

    TRL writes the trainer's state last.
    """
    for folder in sorted(Path(output).glob("checkpoint-*"), key=lambda folder: -int(folder.name.rpartition("-")[2])):
        try:
            return folder, TrainerState.load_from_json(str(folder / "trainer_state.json")).global_step
        except (OSError, ValueError):
            continue
    return None, 0


def recorded_reward(recorded_reward: Sequence[float], **_columns: Any) -> Sequence[float]:
    """Return the rewards on record, as the reward function of a LogGRPOTrainer: TRL computes its metrics from them."""
    return recorded_reward


class LogBatches(TrainerCallback):  # type: ignore[misc]
    """Passes the batches of a run to a LogGRPOTrainer as rollouts, and puts its steps on record.

    In every round of the index each process of the trainer trains on one batch. Process 0 writes.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        model: Any,
        output: str | Path,
        *,
        process: int = 0,
        processes: int = 1,
        input_run: str = "",
        learner: str = "trainer",
        description: str = "{}",
        weights: WeightsConfig | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Continue after the newest whole checkpoint in `output`, the output_dir of TRL; start all processes together.

        Version 0 of a run that has none is `model`. `checkpoint` is that checkpoint, for `resume_from_checkpoint`, and
        `description` the model for readers of the weights (`rollstream.checkpoint_model`). Raises the errors of
        StepWriter and BatchReader.
        """
        self.checkpoint, self.step = newest_checkpoint(output)
        self.processes, self._timeout_s = processes, timeout_s
        self._read: ReadBatch | None = None
        self._writer: StepWriter | None = None
        with ExitStack() as stack:
            if process == 0:
                self._writer = stack.enter_context(
                    StepWriter(
                        kafka,
                        run,
                        learner=learner,
                        input_run=input_run,
                        after_step=self.step,
                        model=description,
                        config=weights,
                    )
                )
                if self._writer.version < 0:
                    self._writer.publish_version(_published(model), version=0)
            recorded = read_steps(kafka, run, learner)
            self.position = recorded[self.step].position if self.step else 0
            """Offset of the index at which the trainer continues."""
            self._reader = stack.enter_context(
                BatchReader(kafka, input_run or run, self.position, process=process, processes=processes)
            )
            self._stack = stack.pop_all()

    def rollouts(self, prompts: Sequence[Any], _trainer: Any) -> dict[str, Any]:
        """Return the rows of this process's next batch, and rows without a trained token if TRL needs more.

        This is the `rollout_func` of the trainer. Raises DeadlineExceeded if no further round arrives in time, and
        ConfigurationError for a batch with more rows than per_device_train_batch_size.
        """
        self._read = self._reader.poll(self._timeout_s)
        if self._read is None:
            raise DeadlineExceeded(f"no further round of batches arrived within {self._timeout_s:g} s")
        examples = self._read.examples()
        if len(examples) > len(prompts):
            raise ConfigurationError(
                f"batch {self._read.entry.batch_id} has {len(examples)} rows, but TRL trains on {len(prompts)}: set "
                "per_device_train_batch_size and num_generations to grouping.batch_rollouts"
            )
        if any(example.media for example in examples):
            raise ConfigurationError(
                f"batch {self._read.entry.batch_id} has images, which a LogGRPOTrainer does not pass to TRL; train on "
                "them with rollstream.consumers.trainers.torch"
            )
        if any(array.name == SAMPLING_MASK for array in self._read.batch.token_arrays):
            raise ConfigurationError(
                f"batch {self._read.entry.batch_id} was sampled with top_p, top_k or min_p, and TRL has no loss over "
                "the tokens that these kept; sample without them, or train with rollstream.consumers.trainers.torch"
            )
        rewards, masks = self._read.batch.rewards.tolist(), [example.loss_mask for example in examples]
        for _ in range(len(prompts) - len(examples)):
            examples, rewards = [*examples, examples[0]], [*rewards, rewards[0]]
            masks.append(np.zeros_like(masks[0]))
        begins = [max(1, int(example.loss_mask.argmax())) for example in examples]
        rows = list(zip(examples, begins, strict=True))
        return {
            "prompt_ids": [row.tokens[:begin].tolist() for row, begin in rows],
            "completion_ids": [row.tokens[begin:].tolist() for row, begin in rows],
            "logprobs": [row.generator_log_probs[begin:].tolist() for row, begin in rows],
            "env_mask": [mask[begin:].astype(int).tolist() for mask, begin in zip(masks, begins, strict=True)],
            "recorded_reward": rewards,
            "advantage": [float(row.advantage[begin]) for row, begin in rows],
        }

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Put the step on record before TRL saves it."""
        self.step = state.global_step
        if self._writer is None or self._read is None:
            return
        # If TRL saves this step, the program may have to resume from the checkpoint before it until that is complete.
        complete = state.global_step - 1 - (state.global_step - 1) % args.save_steps
        self._writer.record([self._read], _published(model), oldest_checkpoint=complete)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Close the clients."""
        self._stack.close()


class LogGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPO with the advantages on the log, computed over whole groups, and ratios to the sampling probabilities."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        advantages = [row["advantage"] for row in inputs]
        scored["advantages"] = torch.tensor(advantages, device=scored["advantages"].device)
        scored["old_per_token_logps"] = scored["sampling_per_token_logps"]
        return scored


def log_trainer(batches: LogBatches, **options: Any) -> GRPOTrainer:
    """Return a LogGRPOTrainer with the options of GRPOTrainer, which `batches` feeds; then call `train`.

    In its GRPOConfig, set per_device_train_batch_size and num_generations to the rows of a batch, and ignore_data_skip.
    """
    from datasets import Dataset

    # First, so that other callbacks see a step once it is on record.
    callbacks = [batches, *options.pop("callbacks", ())]
    return LogGRPOTrainer(
        train_dataset=Dataset.from_dict({"prompt": [""] * batches.processes}),
        reward_funcs=recorded_reward,
        rollout_func=batches.rollouts,
        callbacks=callbacks,
        **options,
    )


def _published(model: Any) -> dict[str, Any]:
    """Return the parameters under the names that inference servers know, in float32."""
    while hasattr(model, "module"):  # A wrapper of accelerate
        model = model.module
    return arrays_of({name: parameter.detach().float() for name, parameter in model.named_parameters()})
