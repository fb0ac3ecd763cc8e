"""Toy targets made in code: small random models with a byte-level tokenizer, saved as folders that everything can load."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from outrider.records import DrafterShape, TokenRows

PAD, START, EOS, MASK, VOCAB = 256, 257, 258, 260, 264  # 0..255 are the bytes; 259 and above never occur in text
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
KINDS = ("llama", "qwen3", "qwen3_5", "sliding")


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, three special tokens, a ChatML template."""
    bytes_in_order = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(bytes_in_order)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHATML
    return fast


def toy_model(
    kind: str, *, seed: int, dtype: torch.dtype = torch.float32, layers: int = 6, tie: bool = False, head_dim: int = 16
) -> PreTrainedModel:
    """A random causal language model of width 32, 4 query and 2 key/value heads; `kind` is one of KINDS.

    Weights are ten times HF's default, so that every layer, head and position changes the outputs by far more than rounding.
    """
    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": head_dim, "max_position_embeddings": 2048, "initializer_range": 0.2,
        "eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": None, "tie_word_embeddings": tie, "dtype": dtype,
    }
    torch.manual_seed(seed)
    match kind:
        case "llama":
            model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**common))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**common))
        case "sliding":
            types = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
            model = Qwen3ForCausalLM(Qwen3Config(**common, use_sliding_window=True, sliding_window=5, layer_types=types))
        case "qwen3_5":
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(
                **common, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
                layer_types=["full_attention" if i % 3 == 2 else "linear_attention" for i in range(layers)],
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                                 "mrope_section": [2, 1, 1], "mrope_interleaved": True},
            ))
        case _:
            raise ValueError(f"toy kind {kind!r}: must be one of {KINDS}")
    with torch.no_grad():  # norms away from 1, so that a norm left out is seen
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype).eval()


def save_toy(folder: Path, kind: str, *, seed: int, dtype: torch.dtype, layers: int, tie: bool) -> Path:
    """Save a toy target and its tokenizer as a Hugging Face folder."""
    toy_model(kind, seed=seed, dtype=dtype, layers=layers, tie=tie).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def rows_of(documents_by_row: list[list[list[int]]], *, length: int, masks: list[list[list[bool]]] | None = None) -> TokenRows:
    """TokenRows from token lists: rows of documents, padded to `length`; `masks` has their supervision (default: all)."""
    B = len(documents_by_row)
    ids, documents = torch.zeros(B, length, dtype=torch.int64), torch.full((B, length), -1)
    positions, mask = torch.zeros(B, length, dtype=torch.int64), torch.zeros(B, length, dtype=torch.bool)
    for b, row in enumerate(documents_by_row):
        at = 0
        for d, tokens in enumerate(row):
            for i, token in enumerate(tokens):
                ids[b, at], documents[b, at], positions[b, at] = token, d, i
                mask[b, at] = masks[b][d][i] if masks else True
                at += 1
    return TokenRows(ids, documents, positions, mask, torch.arange(B))


def random_rows(lengths_by_row: list[list[int]], *, length: int, seed: int, vocab: int = 256) -> TokenRows:
    """Rows of random tokens in documents of these lengths, all supervised."""
    generator = torch.Generator().manual_seed(seed)
    documents = [[torch.randint(vocab, (n,), generator=generator).tolist() for n in row] for row in lengths_by_row]
    return rows_of(documents, length=length)


def toy_shape(**changes: Any) -> DrafterShape:
    """A drafter for the toy targets: 2 layers, K = 4, layers 1, 2, 4 of 6; any field can be changed."""
    values: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": VOCAB, "max_position_embeddings": 2048, "block_size": 4,
        "mask_token_id": MASK, "target_layer_ids": (1, 2, 4), "num_target_layers": 6, "tie_word_embeddings": False,
        "layer_types": ("full_attention",) * changes.get("num_layers", 2), "sliding_window": None,
    }
    return DrafterShape(**{**values, **changes})


def noise(*shape: int, seed: int) -> Tensor:
    """Standard normal float32 of this shape, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
