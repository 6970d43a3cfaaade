"""Names and shapes of a decoder's parameters, without JAX: Hugging Face's names and layout, projections [out, in]."""

from rollstream.consumers.models.config import DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


ADAPTER_A, ADAPTER_B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes that name the adapters of a projection (PEFT's names without its prefix)."""


def is_adapter(name: str) -> bool:
    """Whether a parameter is part of an adapter."""
    return name.endswith((ADAPTER_A, ADAPTER_B))


def is_expert(name: str) -> bool:
    """Whether a parameter is part of an expert, which computes only some tokens."""
    return ".mlp.experts." in name


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the order of the network, then of the adapters."""
    return base_shapes(config) | adapter_shapes(config)


def adapter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every adapter, in the order of the network; experts have none."""
    shapes_by_name: dict[str, tuple[int, ...]] = {}
    rank = config.lora.rank
    for name, shape in base_shapes(config).items() if rank else ():
        projection = name.removesuffix(".weight")
        targeted = projection.rsplit(".", 1)[-1] in config.lora.targets and not is_expert(name)
        if name.endswith(".weight") and targeted:
            shapes_by_name[projection + ADAPTER_A] = (rank, shape[1])
            shapes_by_name[projection + ADAPTER_B] = (shape[0], rank)
    return shapes_by_name


def base_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter except adapters, in the order of the network."""
    width, ff = config.hidden_size, config.intermediate_size
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    shapes_by_name: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        block, attention = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
        shapes_by_name[f"{block}.input_layernorm.weight"] = (width,)
        for name, out in (("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width)):
            shapes_by_name[f"{attention}.{name}.weight"] = (out, width)
            if config.qkv_bias:
                shapes_by_name[f"{attention}.{name}.bias"] = (out,)
        if config.qk_norm:
            shapes_by_name[f"{attention}.q_norm.weight"] = (config.head_dim,)
            shapes_by_name[f"{attention}.k_norm.weight"] = (config.head_dim,)
        shapes_by_name[f"{attention}.o_proj.weight"] = (width, q_width)
        if config.o_bias:
            shapes_by_name[f"{attention}.o_proj.bias"] = (width,)
        shapes_by_name[f"{block}.post_attention_layernorm.weight"] = (width,)
        if config.num_experts:
            shapes_by_name[f"{block}.mlp.gate.weight"] = (config.num_experts, width)
        for expert in range(config.num_experts):
            for name, shape in _feed_forward(width, config.moe_intermediate_size):
                shapes_by_name[f"{block}.mlp.experts.{expert}.{name}.weight"] = shape
        for name, shape in () if config.num_experts else _feed_forward(width, ff):
            shapes_by_name[f"{block}.mlp.{name}.weight"] = shape
            if config.mlp_bias:
                shapes_by_name[f"{block}.mlp.{name}.bias"] = shape[:1]
    shapes_by_name[FINAL_NORM] = (width,)
    if not config.tie_word_embeddings:
        shapes_by_name[HEAD] = (config.vocab_size, width)
    return shapes_by_name


def _feed_forward(width: int, inner: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Projections of a SwiGLU layer."""
    return ("gate_proj", (inner, width)), ("up_proj", (inner, width)), ("down_proj", (width, inner))
