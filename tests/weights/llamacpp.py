"""llama.cpp in this process (xllamacpp): a toy target as GGUF, a server on it with or without a drafter, and what it counted.

Everything in float32 (weights, caches), so that texts and counts can be compared exactly.
"""

import contextlib
import json
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from toys import toy_model, toy_shape, toy_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider.verify.decode import Decoded
from outrider.weights.gguf import vocabulary

ARCHITECTURES = {"llama": "LLAMA", "qwen3": "QWEN3"}
TARGET_NAME = "target.gguf"


@dataclass(frozen=True)
class Answer:
    """What the server gave for one prompt: new tokens, draft tokens verified, and those accepted."""

    tokens: list[int]
    drafted: int
    accepted: int


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """The toys' tokenizer with one merge, "aa" (259): llama.cpp refuses a byte-pair tokenizer that has none."""
    written = json.loads(toy_tokenizer().backend_tokenizer.to_str())
    written["model"]["vocab"]["aa"] = 259
    written["model"]["merges"] = [["a", "a"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)), eos_token="<|im_end|>", pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


def target_folder(folder: Path, kind: str, *, head_dim: int = 16) -> Path:
    """A toy target with `merging_tokenizer`, as a Hugging Face folder, and `target.gguf` in it."""
    model, tokenizer = toy_model(kind, seed=0, head_dim=head_dim), merging_tokenizer()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_target(folder / TARGET_NAME, model, tokenizer)
    return folder


def write_target(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A target of one of ARCHITECTURES as GGUF, in the dtype that its weights have."""
    import gguf

    config, kind = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, kind)
    heads, kv_heads, C = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for add, value in (
        (writer.add_block_count, config.num_hidden_layers), (writer.add_context_length, config.max_position_embeddings),
        (writer.add_embedding_length, config.hidden_size), (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, heads), (writer.add_head_count_kv, kv_heads), (writer.add_key_length, C),
        (writer.add_value_length, C), (writer.add_rope_dimension_count, C), (writer.add_vocab_size, config.vocab_size),
    ):
        add(value)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in vocabulary(toy_shape(vocab_size=config.vocab_size), tokenizer).items():
        {list: writer.add_array, int: writer.add_uint32, str: writer.add_string}[type(value)](key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURES[kind]], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):  # its rotary embedding turns neighbours
            count = heads if "q_proj" in name else kv_heads
            tensor = tensor.view(count, 2, C // 2, -1).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextlib.contextmanager
def llama_server(target: Path, drafter: Path | None, *, drafts: int) -> Iterator[str]:
    """The address of a llama.cpp server in this process; `drafter` None is the target alone."""
    import xllamacpp

    float32 = xllamacpp.ggml_type.GGML_TYPE_F32
    params = xllamacpp.CommonParams()
    params.model.path = str(target)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = 512, 1, 0, -1
    params.warmup = params.fit_params = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = float32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if drafter is not None:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max = str(drafter), drafts
        draft.cache_type_k = draft.cache_type_v = float32
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    yield server.listening_address
    del server


def ask(address: str, prompt: Sequence[int], *, limit: int) -> Answer:
    """Continue a prompt of token ids greedily by at most `limit` tokens."""
    body: dict[str, Any] = {"prompt": list(prompt), "n_predict": limit, "temperature": 0.0, "cache_prompt": False,
                            "return_tokens": True, "samplers": ["temperature"]}
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        found = json.load(answer)
    timings = found["timings"]
    return Answer(found["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))


def expected(longer: Decoded, *, limit: int, drafts: int, stop_ids: Sequence[int] = ()) -> Answer:
    """What llama.cpp should give for a text that our decoder made with `limit + drafts` tokens or more of room, without stops.

    llama.cpp always drafts a whole block, and verifies at most as many of its tokens as leave room for the target's own one
    behind them. Up to the limit its forwards are ours; only the last draft is cut.
    """
    drafted = accepted = 0
    room = limit - 1  # the first token comes with the prompt
    for cycle in longer.cycles[1:]:
        most = min(drafts, room - 1)
        if most <= 0:
            break
        kept = min(len(cycle.accepted), most)
        drafted, accepted, room = drafted + most, accepted + kept, room - kept - 1
        if set(stop_ids) & set(longer.tokens[: limit - room]):
            break
    return Answer(longer.tokens[:limit], drafted, accepted)
