"""Toy targets of more families, for capture: experts, tied and scaled embeddings, soft-caps, sinks, a multimodal wrapper."""

from typing import Any

import torch
from toys import EOS, PAD, VOCAB
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_5 import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from outrider.features.facts import facts_of
from outrider.features.target import Target

LAYERS = 6
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2, "eos_token_id": EOS, "pad_token_id": PAD,
    "bos_token_id": None, "tie_word_embeddings": False, "attn_implementation": "eager",
}
DENSE = {**COMMON, "intermediate_size": 48}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(LAYERS)]
HYBRID = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["full_attention" if i % 3 == 2 else "linear_attention" for i in range(LAYERS)],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
                        "mrope_interleaved": True},
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
          "num_position_embeddings": 16}
FAMILIES = ("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_5_multimodal", "gemma2", "gemma3",
            "gpt_oss")


def family_target(family: str) -> Target:
    """A random float32 target of 6 layers, D = 32; llama's and gemma's heads are tied to the embedding."""
    torch.manual_seed(0)
    model = _model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("norm" in name or "sinks" in name) and parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return Target(model.eval().requires_grad_(False), facts_of(model.config.get_text_config().to_dict(), path=family))


def _model(family: str) -> PreTrainedModel:
    tied = {**DENSE, "tie_word_embeddings": True}
    match family:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**tied))
        case "mistral":
            return MistralForCausalLM(MistralConfig(**DENSE, sliding_window=7))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**DENSE))
        case "qwen3_moe":
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**DENSE, **EXPERTS))
        case "qwen3_5":
            return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**DENSE, **HYBRID))
        case "qwen3_5_moe":
            return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**COMMON, **HYBRID, **EXPERTS, shared_expert_intermediate_size=16))
        case "qwen3_5_multimodal":
            text = Qwen3_5TextConfig(**DENSE, **HYBRID).to_dict()
            return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=VISION))
        case "gemma2":
            return Gemma2ForCausalLM(Gemma2Config(**tied, sliding_window=7, layer_types=SLIDING, query_pre_attn_scalar=16))
        case "gemma3":
            return Gemma3ForCausalLM(Gemma3TextConfig(**tied, sliding_window=7, layer_types=SLIDING, query_pre_attn_scalar=16))
        case "gpt_oss":
            return GptOssForCausalLM(GptOssConfig(**DENSE, num_local_experts=4, num_experts_per_tok=2, sliding_window=7,
                                                  layer_types=SLIDING))
        case _:
            raise ValueError(f"family {family!r}: must be one of {FAMILIES}")
