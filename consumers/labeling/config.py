"""Settings of labeling."""

import re
from dataclasses import dataclass, field

from rollstream.topics.errors import ConfigurationError

JUDGE = "judge"
"""Name of the labeler that asks a model."""
_TEMPLATE = """Rate the answer to the question below from 0 (wrong or useless) to 10 (right and complete).

Question:
{prompt}

Answer:
{response}

Explain in a sentence, then end with a line such as "Score: 7"."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Settings of the labeler `judge`: a model behind an OpenAI-compatible URL that scores rollouts."""

    url: str = ""
    """Base URL that ends in /v1."""
    model: str = "judge"
    """Model name sent with each request."""
    api_key: str = ""
    """Bearer token, as a reference: env:NAME or file:PATH; none if empty."""
    template: str = _TEMPLATE
    """Prompt, in which {prompt}, {response} and {conversation} stand for texts of the rollout."""
    score_pattern: str = r"[Ss]core:\s*(-?[0-9]+(?:\.[0-9]+)?)"
    """Regular expression with one group, the score; the last match in the answer counts."""
    lowest: float = 0.0
    """Score that becomes a reward of 0."""
    highest: float = 10.0
    """Score that becomes a reward of 1."""
    temperature: float = 0.0
    """Sampling temperature of the judge; below 0: none is sent, for models that refuse the parameter."""
    max_tokens: int = 256
    """Maximum number of tokens of the judge's answer; 0: none is sent, for models that refuse the parameter."""
    concurrency: int = 16
    """Maximum number of calls at once."""
    requests_per_s: float = 0.0
    """Maximum number of calls per second of one labeling process; 0 means no limit."""
    timeout_s: float = 60.0
    """Time limit of one call."""
    patience_s: float = 200.0
    """Time for which a failed call is repeated before labeling ends."""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.requests_per_s < 0 or not self.lowest < self.highest:
            raise ConfigurationError(
                f"labeling.judge: concurrency {self.concurrency} must be at least 1, requests_per_s "
                f"{self.requests_per_s:g} at least 0, and lowest {self.lowest:g} below highest {self.highest:g}"
            )
        try:
            groups = re.compile(self.score_pattern).groups
        except re.error as error:
            raise ConfigurationError(f"labeling.judge.score_pattern is not a regular expression: {error}") from error
        if groups != 1:
            raise ConfigurationError(f"labeling.judge.score_pattern has {groups} groups; it needs one, the score")


@dataclass(frozen=True, kw_only=True)
class LabelingConfig:
    """Settings of labeling processes."""

    processes: int = 0
    """Labeling processes that `rollstream run` starts: at least one if the rewards of an environment come from a
    labeler. A run with labeling processes but without such an environment is a control task: it has only the roles
    collect, label and fill."""
    labeler: str = ""
    """Labeler if the command line names none: a function, as package.module:function or path/to/file.py:function, or
    judge."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """Settings of the labeler `judge`."""
    group: str = "labeller"
    """Consumer group, prefixed with the run's name."""
    max_poll_records: int = 16
    """Maximum number of records labeled between two polls of Kafka; a function must label them in less than five
    minutes. The judge may take longer."""
    commit_interval_s: float = 0.1
    """Maximum time that labeled records wait for their transaction."""
    metrics_interval_s: float = 5.0
    """Time between two records of the process on the metrics topic; 0 writes none."""

    def __post_init__(self) -> None:
        if self.max_poll_records < 1 or self.commit_interval_s <= 0:
            raise ConfigurationError(
                f"max_poll_records {self.max_poll_records} must be at least 1, and commit_interval_s "
                f"{self.commit_interval_s:g} above 0"
            )

        if self.processes < 0:
            raise ConfigurationError(f"labeling.processes is {self.processes}; it must be at least 0")
        if self.processes and not self.labeler:
            raise ConfigurationError(
                f"labeling.processes is {self.processes}, but no labeler is named; set labeling.labeler to "
                "package.module:function"
            )

    def group_id(self, run: str) -> str:
        """Return the full name of the consumer group of a run."""
        return f"{run}.{self.group}"
