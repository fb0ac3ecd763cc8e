"""Takes a drafter and its target's tokenizer, gives the GGUF file that llama.cpp drafts from; runs nothing.

Keys and tensor names are those that llama.cpp's loader of the architecture "dflash" asks for.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.errors import UserError
from outrider.model.drafter import Drafter
from outrider.records import SLIDING, DrafterShape

GGUF_NAME = "drafter.gguf"
ARCHITECTURE = "dflash"
TENSORS = {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight"}
LAYER_TENSORS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's kinds of tokens


def check_gguf(shape: DrafterShape, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError when llama.cpp could not draft as this drafter was trained to, or the writer is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("--format gguf: needs the package 'gguf', which is not installed: pip install 'outrider[gguf]'")
    if len(set(shape.layer_types)) > 1:
        raise UserError(f"--format gguf: the drafter mixes full and sliding layers ({', '.join(shape.layer_types)}), and "
                        "llama.cpp has one causality for all layers of a block: leave out gguf")
    _byte_pairs(tokenizer)


def write_gguf(path: Path, drafter: Drafter, tokenizer: PreTrainedTokenizerBase, *, name: str, dtype: torch.dtype) -> None:
    """Write `drafter` to `path`: matrices in `dtype` (float32 or bfloat16), norms in float32.

    The tokenizer's vocabulary is written for the token ids' sake: the target's own file does the tokenizing.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, ARCHITECTURE)
    writer.add_name(name)
    for key, value in metadata(drafter.shape, tokenizer).items():
        _add(writer, key, value)
    for ours, tensor in drafter.state_dict().items():
        values = tensor.detach().cpu()
        if values.dim() == 1 or dtype == torch.float32:  # norms as the other formats round them, in float32 as ggml wants them
            writer.add_tensor(tensor_name(ours), values.to(dtype).float().numpy())
        else:
            raw = values.bfloat16().contiguous().view(torch.uint8).numpy()
            writer.add_tensor(tensor_name(ours), raw, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_name(ours: str) -> str:
    """llama.cpp's name of one of the drafter's tensors."""
    if ours in TENSORS:
        return TENSORS[ours]
    _, layer, part = ours.split(".", 2)
    return f"blk.{layer}.{LAYER_TENSORS[part.removesuffix('.weight')]}.weight"


def metadata(shape: DrafterShape, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The file's keys. llama.cpp counts a layer's output as the next layer's input, so ids are one more than ours."""
    ours: dict[str, Any] = {
        "block_count": shape.num_layers,
        "context_length": shape.max_position_embeddings,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.rms_norm_eps,
        "attention.causal": set(shape.layer_types) == {SLIDING},
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": shape.rope_theta,
        "block_size": shape.block_size,
        "target_layers": [i + 1 for i in shape.target_layer_ids],
        "vocab_size": shape.vocab_size,
    }
    if shape.sliding_window is not None:
        ours["attention.sliding_window"] = shape.sliding_window
        ours["attention.sliding_window_pattern"] = [kind == SLIDING for kind in shape.layer_types]
    return {**{f"{ARCHITECTURE}.{key}": value for key, value in ours.items()}, **vocabulary(shape, tokenizer)}


def vocabulary(shape: DrafterShape, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The `tokenizer.*` keys: one token an id of the target's embedding, those that the tokenizer lacks marked unused."""
    tokens = [f"[unused{i}]" for i in range(shape.vocab_size)]
    kinds = [UNUSED] * shape.vocab_size
    for text, i in tokenizer.get_vocab().items():
        tokens[i], kinds[i] = text, NORMAL
    for i, added in tokenizer.added_tokens_decoder.items():
        tokens[i], kinds[i] = added.content, CONTROL if added.special else USER_DEFINED
    special = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id,
               "mask": shape.mask_token_id}
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": _byte_pairs(tokenizer),
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in special.items() if i is not None},
    }


def _byte_pairs(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The merges of a byte-pair tokenizer, in order. Raises UserError for a tokenizer of another kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # not ours: slow tokenizers of transformers have none
    model = json.loads(backend.to_str())["model"] if backend is not None else {"type": "none"}
    if model["type"] != "BPE" or not model["merges"]:
        raise UserError(f"--format gguf: the target's tokenizer is of type {model['type']}, without merges: only byte-pair "
                        "tokenizers can be written: leave out gguf")
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a key with the width that llama.cpp reads: unsigned 32-bit numbers, 32-bit floats, signed numbers in arrays."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The keys and the tensors (float32) of a file that `write_gguf` wrote, under llama.cpp's names; for the self-check."""
    from gguf import GGMLQuantizationType, GGUFReader

    reader = GGUFReader(path)
    keys = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    tensors = {}
    for found in reader.tensors:
        raw = torch.from_numpy(found.data.copy())
        size = [int(n) for n in reversed(found.shape)]
        wide = raw.view(torch.bfloat16).float() if found.tensor_type == GGMLQuantizationType.BF16 else raw
        tensors[found.name] = wide.reshape(size)
    return keys, tensors
