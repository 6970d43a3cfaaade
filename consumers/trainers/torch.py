"""A training loop of torch as the learner of a run: its share of the batches, its loss, and its steps on the log.

Delivery: each batch is trained on once, whatever is killed. A checkpoint holds parameters, optimizer and position of
the index in one file; steps after it are executed again, on the same batches, and must match the record.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from rollstream.consumers.batch_reader import BatchReader, ReadBatch
from rollstream.consumers.learner.objective import LossConfig, denominator_of, token_weight, trains
from rollstream.consumers.learner.training.packing import TrainingSequence, sequences_of
from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import replacing
from rollstream.topics.wire.media import MEDIA, Medium
from rollstream.topics.wire.rl_examples import SAMPLING_MASK

CLIPPED = ("ppo_clip", "grpo", "dr_grpo", "dapo")
"""Losses that share the clipped surrogate of PPO; `policy_loss` has these and `ce`."""
LARGEST_LOG_RATIO = 20.0
"""Bound of differences of log-probabilities, as in the learner in JAX."""
CHECKPOINT = "learner.pt"
_NEVER = -1e30
"""Logit of removed entries: finite, so that probability 0 times the logit is 0."""


class Rows(NamedTuple):
    """Sequences side by side, padded at their ends; tensors are [rows, tokens], on the device of the model."""

    tokens: torch.Tensor
    """Token ids, int64."""
    attention_mask: torch.Tensor
    """1 for tokens, 0 for padding, int64."""
    loss_mask: torch.Tensor
    """Whether a token is trained, bool; never the first of a row."""
    advantages: torch.Tensor
    sampled_log_probs: torch.Tensor
    """Log-probabilities under the policy that sampled."""
    loss_weights: torch.Tensor
    """Weight of each token in the sum that the reduction divides; 0 where nothing is trained."""
    temperatures: torch.Tensor
    """Sampling temperature of each row, [rows]."""
    kept: torch.Tensor | None = None
    """Entries of the vocabulary to which distributions are limited, int64 [3, entries]: row, position before the token
    that is drawn, entry; positions without any are not limited."""
    inputs: Mapping[str, torch.Tensor] = {}
    """Further arguments of the model: what it sees of the rows' images."""


Pixels = Callable[[Sequence[Sequence[Medium]]], Mapping[str, torch.Tensor]]
"""Returns arguments of a model, such as `pixel_values`, for the images of each row, whose bytes are `Medium.data`."""


def arrays_of(named: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
    """Return tensors as numpy arrays by name, for a StepWriter.

    An array of a contiguous tensor on the CPU is a view of its memory, also in bfloat16. Names of a model that
    torch.compile returned lose their prefix.
    """
    arrays = {}
    for name, tensor in named.items():
        tensor = tensor.detach().cpu().contiguous()
        array = (
            tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            if tensor.dtype == torch.bfloat16
            else tensor.numpy()
        )
        arrays[name.removeprefix("_orig_mod.")] = array
    return arrays


def rows_of(
    sequences: Sequence[TrainingSequence], config: LossConfig, device: Any = "cpu", pixels: Pixels | None = None
) -> Rows:
    """Put sequences side by side, with the weights that the loss's reduction gives to their tokens.

    `pixels` makes the model's input of their images. Raises ConfigurationError for images without it.
    """
    media = [sequence.media for sequence in sequences]
    if any(media) and pixels is None:
        raise ConfigurationError("rollouts have images; give `pixels`, which makes the model's input of them")
    inputs = pixels(media) if pixels is not None and any(media) else {}
    longest = max(len(sequence.tokens) for sequence in sequences)
    shape = len(sequences), longest
    tokens, attention = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.bool_)
    advantages, log_probs, weights = (np.zeros(shape, np.float32) for _ in range(3))
    for row, sequence in enumerate(sequences):
        length = len(sequence.tokens)
        tokens[row, :length], attention[row, :length] = sequence.tokens, 1
        trained = trained_tokens(sequence, config)
        if trained:
            mask[row, 1:length] = sequence.loss_mask[1:]
            weights[row] = mask[row] * np.float32(token_weight(config, trained))
        advantages[row, :length] = sequence.advantages
        log_probs[row, :length] = sequence.generator_log_probs
    temperatures = np.array([sequence.temperature for sequence in sequences], np.float32)
    arrays = (tokens, attention, mask, advantages, log_probs, weights, temperatures)
    tensors = [torch.from_numpy(array).to(device) for array in arrays]
    kept = None if config.name == "ce" else kept_entries(sequences)
    return Rows(*tensors)._replace(
        kept=None if kept is None else torch.from_numpy(kept).to(device),
        inputs={name: tensor.to(device) for name, tensor in inputs.items()},
    )


def kept_entries(sequences: Sequence[TrainingSequence]) -> NDArray[np.int64] | None:
    """Return `Rows.kept` of tokens drawn by top-p, top-k or min-p; None if every row has the whole vocabulary."""
    places = []
    for row, sequence in enumerate(sequences):
        counts, kept = sequence.kept_counts, sequence.kept_tokens
        if counts is not None and kept is not None:
            # The first token of a sequence is never trained.
            entries = kept[int(counts[0]) :]
            positions = np.repeat(np.arange(len(counts) - 1), counts[1:])
            places.append(np.stack([np.full(len(entries), row), positions, entries]))
    return np.concatenate(places, axis=1).astype(np.int64) if places else None


def trained_tokens(sequence: TrainingSequence, config: LossConfig) -> int:
    """Return how many tokens of a sequence are trained."""
    return int(np.count_nonzero(sequence.loss_mask[1:])) if trains(config, sequence.truncated) else 0


def token_log_probs(model: torch.nn.Module, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability and the entropy of tokens 1 onwards, float32 [rows, tokens - 1].

    Both are of distributions limited to `rows.kept`, in which the token itself always stays. `model` is called as those
    of Hugging Face are, with `input_ids`, `attention_mask` and what is in `rows.inputs`, and returns `logits`.
    """
    logits = model(input_ids=rows.tokens, attention_mask=rows.attention_mask, **rows.inputs).logits[:, :-1].float()
    scaled, targets = logits / rows.temperatures[:, None, None], rows.tokens[:, 1:, None]
    if rows.kept is not None:
        row, position, entry = rows.kept
        removed = torch.zeros_like(scaled, dtype=torch.bool)
        removed[row, position] = True
        removed[row, position, entry] = False
        scaled = scaled.masked_fill(removed.scatter(-1, targets, False), _NEVER)
    log_probs = torch.log_softmax(scaled, -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets)[..., 0], entropy


def policy_loss(
    log_probs: torch.Tensor, entropy: torch.Tensor, rows: Rows, config: LossConfig, denominator: float
) -> torch.Tensor:
    """Return the loss of rows, to be minimized: a part of the sum over an update, already divided.

    `log_probs` and `entropy` are [rows, tokens - 1]; `denominator` is the number of trained tokens, or of sequences
    with one (`objective.denominator_of`), over the whole update in all processes. It is the loss of the learner in JAX.
    """
    mask = rows.loss_mask[:, 1:]
    if config.name == "ce":
        loss = -log_probs
    else:
        difference = torch.where(mask, log_probs - rows.sampled_log_probs[:, 1:], 0.0)
        ratio = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
        advantages, recipe = rows.advantages[:, 1:], config.recipe
        within = ratio.clamp(1.0 - recipe.clip_low, 1.0 + recipe.clip_high)
        objective = torch.minimum(ratio * advantages, within * advantages)
        capped = torch.maximum(objective, recipe.ratio_cap * advantages)
        loss = -torch.where(advantages < 0, capped, objective)
    if config.recipe.entropy_coefficient:
        loss = loss - config.recipe.entropy_coefficient * entropy
    return torch.where(mask, rows.loss_weights[:, 1:] * loss, 0.0).sum() / denominator


def check_loss_of(config: LossConfig) -> None:
    """Raise ConfigurationError for a loss or a correction that `policy_loss` does not have."""
    extras = {
        "importance_sampling": config.recipe.importance_sampling != "none",
        "kl_coefficient": config.kl_coefficient,
        "distillation_coefficient": config.distillation_coefficient,
        "reject_*": config.rejections,
        "sequence_mask_limit": config.sequence_mask_limit,
        "reward_coefficient": config.reward_coefficient != 1.0,
    }
    names = [name for name, is_set in extras.items() if is_set]
    if config.name not in (*CLIPPED, "ce") or names:
        raise ConfigurationError(
            f"the torch trainer has the losses {', '.join(CLIPPED)} and ce, without corrections; "
            f"{'leave out ' + ', '.join(names) if names else f'there is no {config.name}'}, or write the loss yourself "
            "with rows_of and token_log_probs"
        )


class TorchLearner(Closing):
    """The learner of a run around a model and an optimizer of torch, in each process of a torch.distributed group.

    In every round of the index each process trains on one batch; gradients are summed over the processes. Process 0
    puts the step on record, publishes the parameters and saves the checkpoint.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: str | Path,
        *,
        loss: LossConfig | None = None,
        rows: int = 8,
        pixels: Pixels | None = None,
        max_grad_norm: float = 1.0,
        save_every: int = 10,
        input_run: str = "",
        learner: str = "trainer",
        description: str = "{}",
        weights: WeightsConfig | None = None,
    ) -> None:
        """Restore the checkpoint in `folder`, if there is one, and publish version 0 of a run that has none.

        Every process gives the bare model, and starts with the parameters of process 0; `folder` is shared by all.
        `rows` is the number of rollouts in one forward pass, `pixels` makes the model's input of their images, which
        are then fetched, and `description` is the model for readers of the weights
        (`rollstream.checkpoint_model`). With weights of `anchor_every` 1, parameters on the CPU are published without a
        copy. Start all processes again, in the same number, once one ended. Raises ConfigurationError for a loss that
        `policy_loss` does not have, and the errors of StepWriter and BatchReader.
        """
        self._model, self._optimizer = model, optimizer
        self._loss, self._rows, self._max_grad_norm = loss or LossConfig(), rows, max_grad_norm
        self._pixels = pixels
        check_loss_of(self._loss)
        self._distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.process = torch.distributed.get_rank() if self._distributed else 0
        processes = torch.distributed.get_world_size() if self._distributed else 1
        self._processes = range(processes)
        self._path, self._save_every = Path(folder, CHECKPOINT), save_every
        self._device = next(model.parameters()).device
        saved = self._restored()
        self.step: int = saved["step"]
        """The last completed step."""
        self._position, self._saved_step = saved["position"], self.step
        self._held: ReadBatch | None = None
        self._writer: StepWriter | None = None
        with ExitStack() as stack:
            if self.process == 0:
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
                    self._writer.publish_version(self._arrays(), version=0)
            self._reader = stack.enter_context(
                BatchReader(
                    *(kafka, input_run or run, self._position),
                    process=self.process,
                    processes=processes,
                    arrays=self._needed(),
                )
            )
            self._stack = stack.pop_all()

    def train(self, timeout_s: float = 600.0) -> dict[str, float] | None:
        """Train one step on one batch for each process, and return its metrics; None if no round arrives in time.

        All processes call this together, and get the same result. Raises the errors of BatchReader.poll and of
        StepWriter.record; a process whose lead failed gets the error of torch.distributed.
        """
        self._held = self._held or self._reader.poll(timeout_s)
        if self._sum([float(self._held is None)])[0]:
            return None
        read, self._held = self._held, None
        assert read is not None
        # Only process 0 writes, and it knows which of its own rows lack an array. So a batch of another is left out.
        incomplete = self._sum([float(bool(read.missing) and number == self.process) for number in self._processes])
        skipped = {
            indexed.entry.batch_id: "a row lacks an array, and the log of its process says why"
            for number, indexed in enumerate(read.round)
            if number and incomplete[number]
        }
        rows = range(0 if read.entry.batch_id in skipped else len(read.batch))
        kept = [row for row in rows if row not in read.missing]
        sequences = [sequence for row, sequence in enumerate(sequences_of(read.batch)) if row in kept]
        counts = [trained_tokens(sequence, self._loss) for sequence in sequences]
        rewards = read.batch.rewards[kept]
        totals = self._sum([sum(counts), sum(map(bool, counts)), len(rewards), float(rewards.sum())])
        denominator = max(1.0, totals[0] if denominator_of(self._loss) == "tokens" else totals[1])
        self._optimizer.zero_grad()
        loss = 0.0
        for begin in range(0, len(sequences), self._rows):
            padded = rows_of(sequences[begin : begin + self._rows], self._loss, self._device, self._pixels)
            part = policy_loss(*token_log_probs(self._model, padded), padded, self._loss, denominator)
            part.backward()
            loss += float(part.detach())
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self._distributed:
                torch.distributed.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm or float("inf"))
        if totals[0]:  # Otherwise momentum alone would move the parameters of a step that trains on nothing.
            self._optimizer.step()
        metrics = {
            "loss": self._sum([loss])[0],
            "optim/grad_norm": float(norm),
            "trained/reward": totals[3] / max(1.0, totals[2]),
            "trained/rollouts": totals[2],
        }
        self._record(read, metrics, skipped)
        self.step, self._position = self.step + 1, read.position
        if self.step % self._save_every == 0:
            self.save()
        return metrics

    def save(self) -> None:
        """Replace the checkpoint as a whole. Every process calls it; it returns once the file is on disk.

        Raises StoreError if it cannot be written.
        """
        if self.process == 0:
            state = {
                "step": self.step,
                "position": self._position,
                "model": self._model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
            }
            with replacing(self._path) as file:
                torch.save(state, file)
        if self._distributed:
            torch.distributed.barrier()
        self._saved_step = self.step

    def close(self) -> None:
        """Close the clients; save first, if steps since the last checkpoint must not be executed again."""
        self._stack.close()

    def _needed(self) -> tuple[str, ...]:
        """Names of arrays that may lie in a store."""
        masks = () if self._loss.name == "ce" else (SAMPLING_MASK,)
        return masks if self._pixels is None else (*masks, MEDIA)

    def _record(self, read: ReadBatch, metrics: Mapping[str, float], skipped: Mapping[str, str]) -> None:
        """Put the step on record before any checkpoint can name it, so that a saved step is always on the log."""
        if self._writer is None:
            return
        # Until a save is complete, the program may have to resume from the checkpoint before it.
        self._writer.record(
            [read], self._arrays(), metrics=metrics, skipped=skipped, oldest_checkpoint=self._saved_step
        )

    def _arrays(self) -> dict[str, NDArray[Any]]:
        # Parameters that share memory, such as a tied head, are named once.
        return arrays_of(dict(self._model.named_parameters()))

    def _restored(self) -> dict[str, Any]:
        if not self._path.exists():
            for tensor in self._model.state_dict().values() if self._distributed else ():
                torch.distributed.broadcast(tensor, 0)
            return {"step": 0, "position": 0}
        saved: dict[str, Any] = torch.load(self._path, map_location=self._device, weights_only=True)
        self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        return saved

    def _sum(self, values: list[float]) -> list[float]:
        """Sum numbers over all processes."""
        if not self._distributed:
            return values
        summed = torch.tensor(values, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(summed)
        result: list[float] = summed.tolist()
        return result
