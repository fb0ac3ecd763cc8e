"""The target: what is read from its config, what is refused in one sentence, and its own answers."""

import functools
import inspect
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from toys import EOS, KINDS, PAD, VOCAB, random_rows, toy_model, toy_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from outrider.errors import UserError
from outrider.features.capture import capture
from outrider.features.facts import read_facts
from outrider.features.target import (
    Target,
    check_head,
    cut_at_stop,
    find_decoder,
    load_ends,
    load_target,
    load_tokenizer,
    read_stop_ids,
    target_digest,
)

ToyFolder = Callable[..., Path]
ToyTarget = Callable[..., Target]


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "target"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_facts(toy_folder: ToyFolder) -> None:
    facts = read_facts(str(toy_folder("qwen3_5")))
    assert (facts.hidden_size, facts.intermediate_size, facts.num_layers) == (32, 48, 6)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.vocab_size) == (4, 2, 16, VOCAB)
    assert (facts.rope_theta, facts.tie_word_embeddings) == (10000.0, False)
    assert facts.layer_kinds == ("linear_attention", "linear_attention", "full_attention") * 2
    assert read_facts(str(toy_folder("sliding"))).layer_kinds[:2] == ("sliding_attention", "full_attention")


@pytest.mark.parametrize("tie", [False, True])
def test_embedding_and_head_are_the_targets_own(toy_target: ToyTarget, tie: bool) -> None:
    target = toy_target("llama", tie=tie)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        out = target.model(ids, output_hidden_states=True)
    assert torch.equal(target.embed(ids), out.hidden_states[0])
    assert torch.equal(target.head.logits(out.hidden_states[-1]), out.logits)
    assert torch.equal(target.head.weight_VD, target.embed(torch.arange(VOCAB))) == tie


def test_a_missing_or_empty_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match=r"no config\.json there"):
            load_target(str(path), dtype="float32", device="cpu", last_layer=None, head=True)
        with pytest.raises(UserError, match=r"no config\.json there"):
            load_tokenizer(str(path))


@pytest.mark.parametrize("text", [
    "{", "[]", "3", "{}", '{"model_type": "no such type"}', '{"model_type": "llama", "hidden_size": "x"}',
])
def test_a_damaged_config(toy_folder: ToyFolder, tmp_path: Path, text: str) -> None:
    folder = copied(toy_folder(), tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"^target\.path = .*: no usable model config: [^\n]*$"):
        read_facts(str(folder))


def test_damaged_missing_and_incomplete_weights(toy_folder: ToyFolder, tmp_path: Path) -> None:
    folder = copied(toy_folder(), tmp_path)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.3.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.3\.mlp\.up_proj\.weight and 1 more tensors are not in its weights files"):
        load_target(str(folder), dtype="float32", device="cpu", last_layer=None, head=True)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"the weights cannot be loaded: [^\n]*$"):
        load_target(str(folder), dtype="float32", device="cpu", last_layer=None, head=True)
    weights.unlink()
    with pytest.raises(UserError, match=r"the weights cannot be loaded: [^\n]*$"):
        load_target(str(folder), dtype="float32", device="cpu", last_layer=None, head=True)


def test_damaged_tokenizer(toy_folder: ToyFolder, tmp_path: Path) -> None:
    folder = copied(toy_folder(), tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"no usable tokenizer: [^\n]*$"):
        load_tokenizer(str(folder))


def test_unsupported_structures_are_refused_in_one_sentence(tmp_path: Path) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=EOS))
    with pytest.raises(UserError, match=r"^target GPT2LMHeadModel: .* no layers and no norm and no embed.* not supported$"):
        find_decoder(gpt2)
    gpt2.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match="this architecture is not supported"):
        load_target(str(tmp_path / "gpt2"), dtype="float32", device="cpu", last_layer=None, head=True)


def test_a_head_with_bias_or_scaled_logits_is_refused(toy_folder: ToyFolder) -> None:
    facts = read_facts(str(toy_folder()))
    model = toy_model("llama", seed=0)
    check_head(Target(model, facts))
    model.lm_head.bias = nn.Parameter(torch.zeros(VOCAB))
    with pytest.raises(UserError, match="linear output head without bias"):
        Target(model, facts)
    model = toy_model("llama", seed=0)
    model.lm_head.register_forward_hook(lambda module, args, out: out * 0.5)
    with pytest.raises(UserError, match=r"its logits are not head\(final hidden state\)"):
        check_head(Target(model, facts))


def test_stop_ids(toy_target: ToyTarget, toy_folder: ToyFolder, tmp_path: Path) -> None:
    """The generation config's, or else the tokenizer's; read from the folder they are the same."""
    target, tokenizer = toy_target("llama"), toy_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert target.stop_ids(tokenizer) == [EOS] == read_stop_ids(str(toy_folder("llama")), tokenizer)
    folder = copied(toy_folder("llama"), tmp_path)
    (folder / "generation_config.json").unlink()
    assert read_stop_ids(str(folder), tokenizer) == [PAD]
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="names no token that ends an answer"):
        read_stop_ids(str(folder), tokenizer)


def test_cut_at_stop() -> None:
    assert cut_at_stop([1, 2, EOS, 3, EOS], [EOS, PAD]) == [1, 2, EOS]
    assert cut_at_stop([1, 2], [EOS]) == [1, 2]
    assert cut_at_stop([], [EOS]) == []


@pytest.mark.parametrize("kind", ["llama", "sliding", "qwen3_5"])
def test_answers_of_a_batch_are_greedy_and_do_not_depend_on_it(toy_target: ToyTarget, kind: str) -> None:
    """Prompts of unlike lengths, padded on the left: each answer is the argmax continuation of its own prompt."""
    target = toy_target(kind)
    prompts = [[5, 6, 7], [9] * 11, [100, 3, 50, 20, 8, 7, 1]]
    settings = {"max_new_tokens": 6, "stop_ids": [EOS], "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    answers = target.answer(prompts, **settings)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 6 and ids[-1] != EOS:
            with torch.no_grad():
                ids.append(int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert answer == ids[len(prompt):]


def test_published_sampling_defaults_do_not_leak(toy_folder: ToyFolder, toy_target: ToyTarget, tmp_path: Path) -> None:
    folder = copied(toy_folder("llama"), tmp_path)
    defaults = {"repetition_penalty": 5.0, "do_sample": True, "temperature": 0.6, "top_k": 3, "eos_token_id": [EOS, PAD]}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    settings = {"max_new_tokens": 20, "stop_ids": [EOS], "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    target = load_target(str(folder), dtype="float32", device="cpu", last_layer=None, head=True)
    assert target.answer([[5, 6, 7]], **settings) == toy_target("llama").answer([[5, 6, 7]], **settings)
    assert target.stop_ids(toy_tokenizer()) == [PAD, EOS]


def test_sampled_answers_depend_on_the_seed_and_leave_the_global_generator_alone(toy_target: ToyTarget) -> None:
    target = toy_target("llama")
    settings = {"max_new_tokens": 12, "stop_ids": [EOS], "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    before = torch.random.get_rng_state()
    first = target.answer([[5, 6]], seed=1, **settings)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert target.answer([[5, 6]], seed=1, **settings) == first
    assert target.answer([[5, 6]], seed=2, **settings) != first


def test_digest_sees_config_and_weights(toy_folder: ToyFolder, tmp_path: Path) -> None:
    folder = copied(toy_folder(), tmp_path)
    first = target_digest(str(folder))
    assert target_digest(str(toy_folder())) == first, "the place does not matter"
    edit_config(folder, rope_theta=5.0)
    changed = target_digest(str(folder))
    assert changed != first
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert target_digest(str(folder)) not in (first, changed)
    assert target_digest("some/hub-id") != target_digest("some/other-id")


@pytest.mark.parametrize("kind", KINDS)
def test_layers_after_the_last_captured_one_are_not_loaded(
    toy_folder: ToyFolder, toy_target: ToyTarget, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 6 layers three are made; what they compute is the same, bit for bit; nothing is said of the tensors left out."""
    target = load_target(str(toy_folder(kind)), dtype="float32", device="cpu", last_layer=2, head=False)
    assert len(target.layers) == 3
    assert target.facts.num_layers == 6
    assert not target.whole
    assert sum(p.numel() for p in target.model.parameters()) < 0.7 * sum(p.numel() for p in toy_target(kind).model.parameters())
    rows = random_rows([[9, 20]], length=32, seed=0)
    assert torch.equal(capture(target, rows, (0, 2)).values_BSF, capture(toy_target(kind), rows, (0, 2)).values_BSF)
    assert not caplog.records


@pytest.mark.parametrize("tie", [False, True])
def test_the_head_is_loaded_only_when_asked_and_once_where_tied(toy_folder: ToyFolder, toy_target: ToyTarget, tie: bool) -> None:
    folder, whole = str(toy_folder("llama", tie=tie)), toy_target("llama", tie=tie)
    bare = load_target(folder, dtype="float32", device="cpu", last_layer=None, head=False)
    assert [tuple(p.shape) for p in bare.model.parameters()].count((VOCAB, 32)) == 1
    assert not bare.whole
    assert whole.whole
    ends = load_ends(folder, dtype="float32", device="cpu")
    assert torch.equal(ends.head.weight_VD, whole.head.weight_VD)
    assert torch.equal(ends.embed(torch.arange(9)), whole.embed(torch.arange(9)))
    assert (ends.head.weight_VD.data_ptr() == ends.embedding.weight.data_ptr()) == tie


@pytest.mark.parametrize(("text", "sentence"), [
    ("[0]", "is not a JSON object"), ("{cut", "is not valid JSON"),
    ('{"eos_token_id": "x"}', r"eos_token_id is \['x'\]: must be"),
])
def test_a_damaged_generation_config_is_refused(toy_folder: ToyFolder, tmp_path: Path, text: str, sentence: str) -> None:
    """Taken for absent, the target would stop at other tokens than it does."""
    folder = Path(shutil.copytree(toy_folder("llama"), tmp_path / "target"))
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_stop_ids(str(folder), load_tokenizer(str(folder)))


def test_checks_run_on_the_readable_delta_rule(toy_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    """And not on a library's that would tune itself first; after them the layers are what they were."""
    target = toy_target("qwen3_5")
    module = sys.modules[type(next(layer for layer in target.layers if hasattr(layer, "linear_attn")).linear_attn).__module__]
    reference = inspect.unwrap(module.torch_chunk_gated_delta_rule)

    @functools.wraps(reference)
    def library(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("tunes itself")

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", library)
    check_head(target)
    assert module.torch_chunk_gated_delta_rule is library
    with pytest.raises(AssertionError, match="tunes itself"):
        target.model(torch.zeros(1, 3, dtype=torch.int64))
