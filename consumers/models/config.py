"""Shape of a decoder, shared by configuration files, weights manifests and the model. Needs no JAX.

The defaults are the model of the demo: 105 thousand parameters over a character vocabulary.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.topics.errors import ConfigurationError


class ComputeSettings(NamedTuple):
    """How the decoder is computed; the settings change results only by rounding."""

    dtype: str = "float32"
    """Dtype of activations and of parameter copies: float32 or bfloat16."""
    remat: bool = False
    """Recompute the activations of a block in the backward pass instead of keeping them."""
    vocabulary_chunk: int = 0
    """Vocabulary entries whose logits are held at once; 0 holds all."""
    attention: str = "auto"
    """auto, plain, blocks or splash (rollstream.consumers.models.attention)."""
    scanned: bool = False
    """Compile one block for all layers."""


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv:2106.09685), which are then trained instead of the model."""

    rank: int = 0
    """Rank of the adapters; 0: none, the whole model is trained."""
    alpha: float = 16.0
    """The product of the two adapters of a projection is multiplied by alpha / rank."""
    targets: tuple[str, ...] = PROJECTIONS
    """Projections that have adapters, in every block; experts have none."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.targets if name not in PROJECTIONS]
        if self.rank < 0 or not self.alpha > 0:
            raise ConfigurationError(
                f"learner.model.lora has rank {self.rank} and alpha {self.alpha}; give a rank of at least 0, and an "
                "alpha above 0"
            )
        if unknown or not self.targets:
            raise ConfigurationError(
                f"learner.model.lora.targets is {list(self.targets)}; give at least one of {', '.join(PROJECTIONS)}"
            )

    @property
    def scale(self) -> float:
        """Factor of the product of two adapters; 0 if there are none."""
        return self.alpha / self.rank if self.rank else 0.0


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder of the Llama family; field names follow Hugging Face's config.json."""

    vocab_size: int = CharacterTokenizer().vocab_size
    """Rows of the embedding."""
    hidden_size: int = 64
    """Width of the residual stream."""
    num_hidden_layers: int = 2
    """Transformer blocks."""
    num_attention_heads: int = 2
    """Query heads."""
    num_key_value_heads: int = 1
    """Key and value heads; query heads share them in equal groups (GQA, arXiv:2305.13245)."""
    head_dim: int = 32
    """Width of one head; even, because RoPE rotates pairs."""
    intermediate_size: int = 192
    """Width of the SwiGLU feed-forward layer."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square before the root."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling_factor: float = 1.0
    """Factor by which Llama 3.1 stretches the slow rotary frequencies; 1 changes none, regardless of the next three
    settings."""
    rope_low_freq_factor: float = 1.0
    """Frequencies with fewer turns than this in `rope_original_positions` are divided by the factor."""
    rope_high_freq_factor: float = 4.0
    """Frequencies with more turns than this are unchanged; between the two the change is gradual."""
    rope_original_positions: int = 8192
    """Length of context before stretching."""
    qk_norm: bool = True
    """Normalize each query and key head before RoPE, as Qwen3 does."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections, as Qwen2 has."""
    o_bias: bool = False
    """A bias on the output projection of attention, part of attention_bias in Llama."""
    mlp_bias: bool = False
    """Biases on the three projections of the feed-forward layer."""
    tie_word_embeddings: bool = True
    """Use the embedding as the output head; otherwise `lm_head.weight` is its own tensor."""
    sliding_window: int = 0
    """Maximum number of tokens that a token attends to, itself included, as in Mistral; 0: no limit."""
    num_experts: int = 0
    """Experts in each block in place of its feed-forward layer, as in Qwen3-MoE; 0: no experts."""
    num_experts_per_tok: int = 0
    """Experts that compute each token."""
    moe_intermediate_size: int = 0
    """Width of the SwiGLU layer of an expert."""
    norm_topk_prob: bool = False
    """Whether the weights of a token's experts are scaled to a sum of 1."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters that are trained instead of the model."""

    def __post_init__(self) -> None:
        if self.num_experts and not (
            1 <= self.num_experts_per_tok <= self.num_experts and self.moe_intermediate_size > 0
        ):
            raise ConfigurationError(
                f"num_experts {self.num_experts} with num_experts_per_tok {self.num_experts_per_tok} and "
                f"moe_intermediate_size {self.moe_intermediate_size}; give 1 to {self.num_experts} experts per token, "
                "and a width above 0"
            )
        if min(self.num_attention_heads, self.num_key_value_heads) < 1:
            raise ConfigurationError(
                f"num_attention_heads is {self.num_attention_heads} and num_key_value_heads "
                f"{self.num_key_value_heads}; both must be at least 1"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigurationError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.sliding_window < 0:
            raise ConfigurationError(
                f"sliding_window is {self.sliding_window}; give at least 1 token, or 0 for no window"
            )
        if self.head_dim % 2:
            raise ConfigurationError(f"head_dim {self.head_dim} is odd; rotary embeddings need an even number")
        if self.rope_high_freq_factor <= self.rope_low_freq_factor or self.rope_scaling_factor < 1:
            raise ConfigurationError(
                f"rope_scaling_factor {self.rope_scaling_factor} must be at least 1, and rope_low_freq_factor "
                f"{self.rope_low_freq_factor} below rope_high_freq_factor {self.rope_high_freq_factor}"
            )


def expert_dtype(config: DecoderConfig) -> str:
    """Return the smallest dtype of the numbers of experts, whose largest value stands for an unknown expert."""
    return "|u1" if config.num_experts < 256 else "<u2"


def decoder_config(text: str) -> DecoderConfig:
    """Return the decoder that a manifest describes in JSON. Raises ConfigurationError if it describes none."""
    try:
        settings = json.loads(text)
        if not settings:
            raise ValueError("it is empty")
        lora = settings.pop("lora")
        return DecoderConfig(**settings, lora=LoraConfig(**lora | {"targets": tuple(lora["targets"])}))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{text[:100]!r} does not describe a supported model: {error}") from error


def manifest_model(config: DecoderConfig) -> str:
    """Return a decoder in JSON for a manifest."""
    return json.dumps(asdict(config))
