"""Settings of the environment worker, its flow control, evaluation, and the inference server."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from rollstream.topics.errors import ConfigurationError

_WORKER_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """One environment worker."""

    worker_id: str = "env-0"
    """Name of the worker, unique within the run; part of every uid, and of the URLs that agents get: up to 100 letters,
    digits, '.', '_' and '-'. Several workers of a run append their ordinals."""
    inference_urls: tuple[str, ...] = ("http://127.0.0.1:8000/v1",)
    """Servers of one model: rollstream's, vLLM or SGLang. A group stays with one server until that server fails."""
    engine: Literal["auto", "rollstream", "vllm", "sglang"] = "auto"
    """Kind of the servers; auto asks each server. Use rollstream also for any server of OpenAI's completions API that
    returns token ids."""
    max_version_skew: int = 2
    """Policy versions that a server may be behind the newest server; a server further behind gets no requests until it
    has caught up. A negative number means no limit."""
    model: str = "policy"
    """Model name sent to the servers."""
    api_key: str = ""
    """Bearer token sent to the servers, as a reference: env:NAME or file:PATH; none if empty."""
    group_size: int = 16
    """Rollouts of one prompt whose rewards are compared."""
    concurrency: int = 4
    """Groups in flight at once."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """The likeliest tokens that together reach this probability are sampled from; 1 samples from all. Like top_k and
    min_p, it needs servers that name the kept tokens: rollstream's, or vLLM with --return-sampling-mask, or
    SGLang. Evaluations sample from all tokens."""
    top_k: int = 0
    """Number of likeliest tokens that are sampled from; 0 samples from all."""
    min_p: float = 0.0
    """Tokens of at least this share of the highest probability are sampled from; 0 samples from all."""
    seed: int = 0
    """Seed of the order of prompts, in which all workers take turns, and of sampling, for which the group's id makes it
    different for each group."""
    logprobs_mode: Literal["raw", "processed"] = "processed"
    """Distribution of the server's logprobs: the model's (raw), or the one sampled from (processed; rollstream's)."""
    assume_version: int = -1
    """Policy version assumed for a server that reports none, e.g. of a fixed model; -1 refuses such a server."""
    routed_experts: bool = True
    """Record the experts that computed each token, for routing replay, where servers name them: rollstream's do for a
    model with experts, vLLM and SGLang if they were started with --enable-return-routed-experts."""
    request_timeout_s: float = 60.0
    """Time for one request, retries included; after that the worker cancels the members without an answer."""
    episode_timeout_s: float = 600.0
    """Time for one episode, with its verifier and all attempts; after that the worker cancels the member."""
    episode_attempts: int = 2
    """Attempts at an episode whose environment or verifier fails; after that the worker cancels the member."""
    drain_timeout_s: float = 10.0
    """Time for groups in flight to finish after SIGTERM; after that the worker cancels them on the log."""
    groups: int = 0
    """Groups to produce before stopping; 0 means no limit."""
    metrics_interval_s: float = 5.0
    """Time between two records of the worker on the metrics topic; 0 writes none."""

    def __post_init__(self) -> None:
        if not _WORKER_ID.fullmatch(self.worker_id):
            raise ConfigurationError(
                f"worker.worker_id is {self.worker_id!r}; use up to 100 letters, digits, '.', '_' and '-'"
            )
        for name in ("group_size", "concurrency", "episode_attempts"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"worker.{name} is {getattr(self, name)}; it must be at least 1")
        if not self.episode_timeout_s > 0:
            raise ConfigurationError(f"worker.episode_timeout_s is {self.episode_timeout_s}; it must be above 0")
        if not 0 <= self.drain_timeout_s < math.inf:
            raise ConfigurationError(
                f"worker.drain_timeout_s is {self.drain_timeout_s}; it must be a finite number, at least 0"
            )
        if not (0 < self.top_p <= 1 and self.top_k >= 0 and 0 <= self.min_p <= 1):
            raise ConfigurationError(
                f"worker has top_p {self.top_p}, top_k {self.top_k} and min_p {self.min_p}; give a top_p above 0 "
                "and at most 1, a top_k of at least 0, and a min_p of 0 to 1"
            )
        if (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0) and self.logprobs_mode == "raw":
            raise ConfigurationError(
                'worker.logprobs_mode is "raw", but with top_p, top_k or min_p the logprobs must be of the '
                'distribution sampled from: start the servers with processed ones, and set logprobs_mode to "processed"'
            )
        if not self.inference_urls:
            raise ConfigurationError(
                "worker.inference_urls is empty; name at least one server, e.g. http://host:8000/v1"
            )
        if not self.temperature > 0:
            raise ConfigurationError(
                f"worker.temperature is {self.temperature}; it must be above 0, because greedy groups have no variance"
            )


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """One environment of the mixture that workers play: an entry `[[environments]]`."""

    NAMED_BY: ClassVar[tuple[str, ...]] = ("name", "use")

    use: str = ""
    """Environment: a built-in name, package.module:Class, path/to/file.py:Class, the name of an entry point of the
    group rollstream.environments, or the URL of one that `rollstream env serve` runs."""
    name: str = ""
    """Name in every record; the environment's own name if empty. It must not change within a run."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    weight: float = 1.0
    """Share of the groups started, relative to the other weights; an environment of weight 0 is only evaluated."""
    quota: float = 1.0
    """Largest share of the flow control's capacity that its unfinished rollouts may use, above 0 and at most 1."""
    workers: int = 0
    """Number of workers that play it, counted from the first; 0 means all."""
    group_size: int = 0
    """Rollouts of a group; 0 uses worker.group_size."""
    temperature: float = 0.0
    """Sampling temperature; 0 uses worker.temperature."""
    max_tokens: int = 0
    """Maximum number of tokens in a reply; 0 uses the environment's own limit. It is refused for an environment that
    calls the policy itself, as `tools` and `verifiers` do, whose limit is one of its `options`."""
    rewards: Literal["environment", "labeler"] = "environment"
    """Source of its rewards: the environment's own score, or a labeler, for which the rollouts wait on `unlabelled`.
    """
    evaluate: bool = True
    """Whether evaluations use its held-out prompts."""
    max_prompts: int = 0
    """Number of held-out prompts to evaluate, counted from the first; 0 uses evaluation.max_prompts."""
    samples: int = 0
    """Answers that an evaluation samples for each prompt; 0 uses evaluation.samples."""
    suites: tuple[str, ...] = ()
    """Names of suites of evaluations: the figures of a suite are the means of those of its environments."""

    after: tuple[str, ...] = ()
    """Names of environments that unlock this one once each has reached `unlock_at`; if empty, it is never locked."""
    unlock_at: float = 0.5
    """Success rate, from 0 to 1, that each environment of `after` must reach to unlock this one."""

    def __post_init__(self) -> None:
        if not self.use:
            raise ConfigurationError(
                'use is missing: name the environment, e.g. use = "dsort3" or use = "my_game.py:Game"'
            )
        for name in ("workers", "group_size", "temperature", "max_tokens", "max_prompts", "samples"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if not 0 <= self.weight < math.inf:
            raise ConfigurationError(f"weight is {self.weight}; it must be at least 0, and finite")
        if not self.weight and (not self.evaluate or self.rewards == "labeler"):
            raise ConfigurationError(
                f"environment {self.name or self.use} has weight 0, so it is only evaluated, but its evaluate or "
                "rewards rule out evaluations; change that, or remove its entry"
            )
        if not 0 < self.quota <= 1:
            raise ConfigurationError(f"quota is {self.quota}; it must be above 0 and at most 1")
        if not 0 <= self.unlock_at <= 1:
            raise ConfigurationError(f"unlock_at is {self.unlock_at}; it must be from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """How the weights of environments follow their success rates: the shares of rollouts that solve their task."""

    enabled: bool = False
    """Whether the weight of an environment with success rate r is multiplied by 4 r (1 - r)."""
    floor: float = 0.1
    """Minimum of that factor, so that mastered and hopeless environments are still played."""
    window_groups: int = 64
    """Groups of a worker over which a success rate is measured; the weight of older groups decays."""
    min_groups: int = 8
    """Groups that all workers together must measure before a success rate counts; at most window_groups."""
    easy_share: float = 1.0
    """Share of the prompts that every member of their last group solved that are played when they are due again."""
    hard_share: float = 1.0
    """The same share of the prompts that no member solved."""
    state_interval_s: float = 5.0
    """Interval at which a worker records its position in the prompts and its success rates on `control`."""

    def __post_init__(self) -> None:
        for name in ("window_groups", "min_groups"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"curriculum.{name} is {getattr(self, name)}; it must be at least 1")
        if self.min_groups > self.window_groups:
            raise ConfigurationError(
                f"curriculum.min_groups {self.min_groups} is more than curriculum.window_groups {self.window_groups}, "
                "over which a success rate is measured; lower it, or raise window_groups"
            )
        for name in ("easy_share", "hard_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"curriculum.{name} is {getattr(self, name)}; it must be from 0 to 1")
        if not 0 < self.floor <= 1:
            raise ConfigurationError(f"curriculum.floor is {self.floor}; it must be above 0 and at most 1")
        if not self.state_interval_s > 0:
            raise ConfigurationError(f"curriculum.state_interval_s is {self.state_interval_s}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """Processes that play control tasks and write trajectories. A run with such processes has no roles for tokens."""

    processes: int = 0
    """Collecting processes that `rollstream run` starts."""
    player: str = ""
    """Generator function that plays, as package.module:function or path/to/file.py:function. It receives a Seat and
    yields chunk steps."""
    environment: str = "control"
    """Name of the environment, recorded in every trajectory."""
    steps: int = 80
    """Chunk steps of a trajectory; fewer if a record has no room for that many."""
    max_episode_length: int = 0
    """Maximum number of steps in an episode, recorded in trajectories; 0 means no limit."""
    trajectories: int = 0
    """Trajectories that one process sends before it ends; 0 means no limit."""
    seed: int = 0
    """Seed passed to the player; the same in all processes."""
    options: dict[str, str] = field(default_factory=dict)
    """Options passed to the player."""

    def __post_init__(self) -> None:
        if self.processes < 0 or self.trajectories < 0 or self.steps < 1:
            raise ConfigurationError(
                f"collect.processes {self.processes} and collect.trajectories {self.trajectories} must be at least 0, "
                f"and collect.steps {self.steps} at least 1"
            )
        if self.processes and not self.player:
            raise ConfigurationError(
                f"collect.processes is {self.processes}, but no player is set; set collect.player to "
                "package.module:function"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out prompts during a run, written to `evals`. It uses the servers of worker.inference_urls."""

    every_versions: int = 0
    """Evaluate the policy versions divisible by this number, version 0 included, except a version that is overtaken by
    a later one before its evaluation begins; 0 evaluates none."""
    max_prompts: int = 0
    """Number of held-out prompts to evaluate, counted from the first; 0 means all."""
    samples: int = 1
    """Answers to sample for each prompt, for avg@n and pass@k; more than 1 needs a temperature above 0."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    concurrency: int = 64
    """Prompts in flight at once, each with all its samples."""
    seed: int = 0
    """Seed for sampling above temperature 0."""
    metrics_interval_s: float = 5.0
    """Time between two records of the evaluator's progress on the metrics topic; 0 writes none."""
    processes: int = 1
    """Evaluators that `rollstream run` starts; they divide the environments among themselves."""

    def __post_init__(self) -> None:
        least_of = {"every_versions": 0, "max_prompts": 0, "samples": 1, "temperature": 0, "concurrency": 1}
        least_of["processes"] = 1
        for name, least in least_of.items():
            if not getattr(self, name) >= least:
                raise ConfigurationError(f"evaluation.{name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class Gsm8kConfig:
    """The task gsm8k: arithmetic word problems (arXiv:2110.14168), from files with one JSON object per line, which has
    the fields question and answer."""

    train_file: str = ""
    """Problems to train on, such as GSM8K's train.jsonl."""
    heldout_file: str = ""
    """Problems to evaluate on, such as GSM8K's test.jsonl; if empty, every fifth problem of train_file is held out."""
    prompt: Literal["plain", "chatml"] = "chatml"
    """Prompt template: chatml for a chat model such as Qwen's, plain for a base model that continues text."""
    max_tokens: int = 320
    """Maximum number of tokens in an answer."""


@dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """Settings of individual tasks."""

    gsm8k: Gsm8kConfig = field(default_factory=Gsm8kConfig)
    """Arithmetic word problems."""


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """Limit on how far producers run ahead of the learner, made of settings of producers, grouping and the learner."""

    max_policy_lag: int = 4
    """Maximum number of steps between producing a rollout and training on it."""
    rollouts_per_step: int = 256
    """Rollouts of one learner step."""
    partitions: int = 4
    """Partitions of the topic `rollouts`."""
    batch_rollouts: int = 64
    """Rollouts of one training batch."""
    group_size: int = 16
    """Rollouts of one group."""
    workers: int = 1
    """Workers that share the capacity."""
    in_flight: int = 0
    """Rollouts that one worker can have started before grouping reads them, by its concurrency; 0 if unknown."""
    quotas: Mapping[str, float] = field(default_factory=dict)
    """Largest share of the outstanding rollouts by environment, above 0 and at most 1; an environment without a quota
    may have all of them. Quotas apply only while a whole step is waiting for the learner."""

    @property
    def fresh(self) -> int:
        """Rollouts that the learner can train on, in order, before a rollout started now becomes too stale."""
        return (self.max_policy_lag + 1) * self.rollouts_per_step

    @property
    def resting(self) -> int:
        """Rollouts that can wait on the partitions: an incomplete batch and an incomplete group on each."""
        return self.partitions * (self.batch_rollouts - 1 + self.group_size)

    @property
    def floor(self) -> int:
        """Rollouts that can wait in the pipeline until more arrive: `resting` plus an incomplete step."""
        return self.rollouts_per_step + self.resting

    @property
    def needed(self) -> int:
        """Fewest outstanding rollouts with which a step is always completed: the floor plus a group in flight for each
        worker."""
        return self.floor + self.workers * self.group_size

    @property
    def limit(self) -> int:
        """Maximum number of rollouts that are produced and not yet trained on, skipped or dropped.

        Rollouts that wait on a partition are overtaken by rollouts of other partitions and become stale, so `resting`
        is subtracted from `fresh`, but at least `needed` rollouts remain.
        """
        return min(self.fresh, max(self.needed, self.fresh - self.resting))

    @property
    def share(self) -> int:
        """Maximum number of one worker's rollouts that grouping has not read yet.

        A share beyond `in_flight` would reserve capacity that the worker never uses, and the other workers would fill
        the remaining capacity in bursts.
        """
        share = (self.limit - self.floor) // self.workers
        return min(share, max(self.in_flight, self.group_size)) if self.in_flight else share


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Inference servers of a run."""

    replicas: int = 1
    """Servers that `rollstream run` starts, each with the whole model. 0 starts none: workers then use the servers of
    worker.inference_urls. The default is 0 if worker.inference_urls is set and inference.port is not."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0 chooses a free port. Replica N listens on this port plus N."""
    model: str = "policy"
    """Name of the served model; requests for another model are refused."""
    replica_id: str = "infer-0"
    """Name of the server, reported in each response; the name of replica N ends in N instead of 0."""
    max_model_len: int = 64
    """Maximum number of tokens in a prompt and its answer together; learner.sequence_length if not set."""
    chat_template: str = ""
    """Chat template: the name of a renderer of the library `renderers`, such as qwen3 (extra chat), the path of a Jinja
    template, or plain. If empty, the checkpoint's own template is used, or plain if it has none."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, e.g. enable_thinking = false; a request's own chat_template_kwargs win."""
    api_key: str = ""
    """Bearer token that requests must carry, as a reference: env:NAME or file:PATH; none if empty. Workers also use it
    if worker.api_key is not set."""
    max_rows: int = 256
    """Sequences decoded in parallel, each in a slot of the cache. A request is refused if n times its number of prompts
    is larger."""
    decode_steps: int = 8
    """Tokens decoded for each sequence before sequences can join or leave and new weights can be loaded."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters, activations and cached keys and values."""
    devices: int = 1
    """Local devices to use; each group of inference.tensor_parallel devices holds the parameters and an equal share of
    the sequences. 0 uses all."""
    tensor_parallel: int = 1
    """Devices over which each matrix product, and so the parameters and the cache, are split, for models that do not
    fit on one device. It must divide inference.devices and the model's num_key_value_heads."""
    max_cache_mib: int = 4096
    """Maximum size of the cache of keys and values, in MiB; the server does not start if max_rows sequences of
    max_model_len tokens need more."""
    swap: Literal["between_steps", "between_requests"] = "between_steps"
    """When new weights are loaded. between_steps: at once, so one sequence may have tokens of several policy versions.
    between_requests: when all requests in decoding have ended, while new requests wait."""
    gather_ms: float = 3.0
    """Time for which an idle server waits for more requests after the first."""
    refresh_ms: float = 20.0
    """Interval at which an idle server checks for new weights."""
    max_waiting_requests: int = 1024
    """Requests that may wait to be decoded; further requests are refused with status 429."""
    max_body_bytes: int = 1024 * 1024
    """Maximum size of a request's body in bytes; larger requests are refused with status 413."""
    drain_timeout_s: float = 10.0
    """Time for requests in flight to be answered after SIGTERM; new requests are refused with status 503."""
    truncated_sampling: bool = False
    """Whether requests may set top_p, top_k or min_p without return_sampling_mask. Logprobs then refer to the truncated
    distribution, which a learner cannot recompute; for evaluation and agents, not for rollouts to train on."""
    conversation_cache_tokens: int = 4_000_000
    """Tokens of recent conversations that the server keeps, 4 bytes each, to continue conversations as sampled."""
    seed: int = 0
    """Seed of requests that set none."""
    metrics_interval_s: float = 5.0
    """Time between two records of the server on the metrics topic; 0 writes none."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_model_len", 2),
            ("max_rows", 1),
            ("decode_steps", 1),
            ("devices", 0),
            ("tensor_parallel", 1),
            ("max_waiting_requests", 1),
            ("max_body_bytes", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigurationError(f"inference.{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("drain_timeout_s", "conversation_cache_tokens"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"inference.{name} is {getattr(self, name)}; it must be at least 0")
        if self.replicas < 0:
            raise ConfigurationError(f"inference.replicas is {self.replicas}; it must be at least 0")
        if not 0 <= self.port <= 65535 or self.port + max(0, self.replicas - 1) > 65535:
            raise ConfigurationError(
                f"inference.port is {self.port}; it must be between 0 and 65535 (0 chooses one), and so must the port "
                f"of the last of {self.replicas} inference.replicas"
            )

    def replica(self, ordinal: int) -> "InferenceConfig":
        """Return the settings of server `ordinal`, counted from 0, with its own port and name."""
        if not ordinal:
            return self
        port = self.port + ordinal if self.port else 0
        name = f"{self.replica_id.removesuffix('-0')}-{ordinal}"
        return replace(self, port=port, replica_id=name, replicas=1)
