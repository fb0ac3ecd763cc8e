"""Published folders that are damaged, wrong or of another target: `evaluate` and `train` refuse each in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from overfit import random_drafter
from safetensors.torch import load_file, save_file
from toys import VOCAB, toy_shape
from verbs import refusal, result

from outrider import cli
from outrider.files import write_json
from outrider.model.published import CONFIG_NAME, WEIGHTS_NAME, to_config
from outrider.weights.export import write_published
from outrider.weights.opening import open_drafter

Change = Callable[[dict[str, Any]], object]
RUN_FILE = """
[target]
path = "{target}"
dtype = "float32"
[data]
rows = "{rows}"
[drafter]
num_layers = 2
block_size = 4
mask_token_id = 260
target_layer_ids = [1, 2, 4]
[layout]
anchors = 8
[train]
folder = "{folder}/run"
init_from = "{folder}/drafter"
precision = "float32"
steps = 1
"""
NAN, INF = float("nan"), float("inf")


def setting(**values: Any) -> Change:
    return lambda config: config.update(values)


def inner(**values: Any) -> Change:
    return lambda config: config["dflash_config"].update(values)


def without(*path: str) -> Change:
    return lambda config: (config[path[0]] if len(path) > 1 else config).pop(path[-1])


CONFIGS: dict[str, tuple[Change, str]] = {
    "another width": (setting(hidden_size=64), "has shape"),
    "another vocabulary": (setting(vocab_size=VOCAB + 8), f"whose vocabulary is {VOCAB + 8}, this target's is {VOCAB}"),
    "another depth": (setting(num_target_layers=9), "whose number of layers is 9, this target's is 6"),
    "no depth": (without("num_target_layers"), "'num_target_layers' is missing"),
    "no layer ids": (without("dflash_config", "target_layer_ids"), "'target_layer_ids' is missing"),
    "no layer id in the list": (inner(target_layer_ids=[]), "target_layer_ids"),
    "a layer id too far": (inner(target_layer_ids=[1, 2, 9]), "target_layer_ids has 9"),
    "the last layer": (inner(target_layer_ids=[1, 2, 5]), "target_layer_ids has 5"),
    "a negative layer id": (inner(target_layer_ids=[-1, 2, 4]), "target_layer_ids has -1"),
    "a layer id twice": (inner(target_layer_ids=[1, 1, 4]), "target_layer_ids"),
    "layer ids as words": (inner(target_layer_ids=["1", "2", "4"]), "must be a list of int"),
    "one layer id for three": (inner(target_layer_ids=[1]), "tensor 'fc.weight' has shape"),
    "no mask token": (without("dflash_config", "mask_token_id"), "'mask_token_id' is missing"),
    "a mask token outside": (inner(mask_token_id=VOCAB), f"mask_token_id = {VOCAB}"),
    "a negative mask token": (inner(mask_token_id=-1), "mask_token_id = -1"),
    "a mask token as a word": (inner(mask_token_id="<mask>"), "mask_token_id = '<mask>': must be of type int"),
    "no block size": (without("block_size"), "'block_size' is missing"),
    "a block of one": (lambda c: (c.update(block_size=1), c["dflash_config"].update(block_size=1)), "block_size = 1"),
    "two block sizes": (setting(block_size=8), "dflash_config.block_size = 4: must equal block_size = 8"),
    "a block size as a float": (setting(block_size=4.0), "block_size = 4.0: must be of type int"),
    "no section of its own": (without("dflash_config"), "'dflash_config' is missing"),
    "a section that is a list": (setting(dflash_config=[]), "dflash_config = []: must be of type dict"),
    "stretched rotary positions": (setting(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), "yarn"),
    "rotary scaling": (setting(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling"),
    "part of the head turned": (setting(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    "two rotary bases": (setting(rope_theta=5e5), "rope_parameters"),
    "no rotary base": (lambda c: (c.pop("rope_theta"), c.pop("rope_parameters")), "'rope_theta' is missing"),
    "biases": (setting(attention_bias=True), "attention_bias = True: must be False"),
    "another activation": (setting(hidden_act="gelu"), "hidden_act = 'gelu': must be 'silu'"),
    "another architecture": (setting(architectures=["EagleDraftModel"]), "must be ['DFlashDraftModel']"),
    "another model type": (setting(model_type="llama"), "model_type = 'llama': must be 'qwen3'"),
    "causal full layers": (setting(is_causal=True), "is_causal = True: does not fit layer_types"),
    "windows without a size": (setting(layer_types=["sliding_attention"] * 2, use_sliding_window=True, is_causal=True),
                               "sliding_window"),
    "windows switched off": (setting(layer_types=["sliding_attention"] * 2, sliding_window=8), "use_sliding_window = False"),
    "a kind for one layer of two": (setting(layer_types=["full_attention"]), "layer_types"),
    "an unknown kind": (setting(layer_types=["full_attention", "linear_attention"]), "layer_types"),
    "more layers than there are": (setting(num_hidden_layers=3, layer_types=["full_attention"] * 3), "lacks tensor 'layers.2."),
    "heads that do not divide": (setting(num_key_value_heads=3), "num_kv_heads|num_key_value_heads|has shape"),
    "no heads": (setting(num_attention_heads=0), "num_attention_heads = 0: must be positive"),
    "an odd head": (setting(head_dim=15), "head_dim|has shape"),
    "a scaled embedding": (inner(input_embedding_scale=5.66), "input_embedding_scale = 5.66"),
}
TENSORS: dict[str, tuple[Change, str]] = {
    "a tensor missing": (without("layers.1.self_attn.k_norm.weight"), "lacks tensor 'layers.1.self_attn.k_norm.weight'"),
    "a head of its own": (lambda t: t.update({"lm_head.weight": torch.zeros(VOCAB, 32)}), "unknown tensor 'lm_head.weight'"),
    "an embedding of its own": (lambda t: t.update({"embed_tokens.weight": torch.zeros(VOCAB, 32)}), "unknown tensor 'embed_"),
    "a vocabulary of its own": (lambda t: t.update({"d2t": torch.zeros(9, dtype=torch.int64)}), "unknown tensor 'd2t'"),
    "biases in the file": (lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.zeros(64)}), "unknown tensor"),
    "a tensor on its side": (lambda t: t.update({"fc.weight": t["fc.weight"].T.contiguous()}), "tensor 'fc.weight' has shape"),
    "eight-bit weights": (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}), "float8_e4m3fn"),
    "whole numbers": (lambda t: t.update({"norm.weight": t["norm.weight"].int()}), "tensor 'norm.weight' is int32"),
    "not a number": (lambda t: t["fc.weight"].view(-1).__setitem__(5, NAN), "'fc.weight' holds values that are not finite"),
    "infinite": (lambda t: t["norm.weight"].__setitem__(0, INF), "tensor 'norm.weight' holds values that are not finite"),
    "beyond float16": (lambda t: t.update({"norm.weight": (t["norm.weight"] * 1e6).half()}), "not finite"),
}
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "half of the weights": (lambda f: (f / WEIGHTS_NAME).write_bytes((f / WEIGHTS_NAME).read_bytes()[:9000]), "cannot be read"),
    "an empty file of weights": (lambda f: (f / WEIGHTS_NAME).write_bytes(b""), "cannot be read"),
    "weights that are text": (lambda f: (f / WEIGHTS_NAME).write_text("version https://git-lfs.github.com/spec/v1\n"),
                              "cannot be read"),
    "weights that are a folder": (lambda f: ((f / WEIGHTS_NAME).unlink(), (f / WEIGHTS_NAME).mkdir()), "cannot be read"),
    "no weights": (lambda f: (f / WEIGHTS_NAME).unlink(), "weights are missing"),
    "half of the config": (lambda f: (f / CONFIG_NAME).write_text((f / CONFIG_NAME).read_text()[:300]), "is not valid JSON"),
    "a config that is a list": (lambda f: (f / CONFIG_NAME).write_text("[1]"), "is not a JSON object"),
    "a config that is not text": (lambda f: (f / CONFIG_NAME).write_bytes(b"\xff\xfe\x00"), CONFIG_NAME),
    "no config": (lambda f: (f / CONFIG_NAME).unlink(), "holds no drafter"),
    "nothing": (lambda f: [path.unlink() for path in f.iterdir()], "holds no drafter"),
    "no folder": (lambda f: ([path.unlink() for path in f.iterdir()], f.rmdir()), "no such folder"),
}


@pytest.fixture
def folder(tmp_path: Path, toy_folder: Callable[..., Path], toy_rows: Path) -> Path:
    """A drafter as z-lab publishes it, a prompts file and a run file that begins from the drafter, for the llama toy."""
    drafter = random_drafter(toy_shape(), seed=0)
    (tmp_path / "drafter").mkdir()
    write_published(tmp_path / "drafter", drafter, to_config(drafter.shape, embedding_scale=1.0, softcap=None, dtype="float32"))
    (tmp_path / "run.toml").write_text(RUN_FILE.format(target=toy_folder("llama"), rows=toy_rows, folder=tmp_path))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1?"}\n')
    return tmp_path


def refusals(folder: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [
        refusal(capsys, "evaluate", folder / "prompts.jsonl", "--target", target, "--drafter", folder / "drafter",
                "--max-new-tokens", 4),
        refusal(capsys, "train", folder / "run.toml"),
    ]


def break_folder(folder: Path, fault: str) -> str:
    """Do what the case says to the drafter's folder; gives what the refusal must say."""
    drafter = folder / "drafter"
    if fault in CONFIGS:
        change, message = CONFIGS[fault]
        config = json.loads((drafter / CONFIG_NAME).read_text())
        change(config)
        write_json(drafter / CONFIG_NAME, config)
    elif fault in TENSORS:
        change, message = TENSORS[fault]
        tensors = load_file(drafter / WEIGHTS_NAME)
        change(tensors)
        save_file(tensors, drafter / WEIGHTS_NAME)
    else:
        do, message = FILES[fault]
        do(drafter)
    return message


@pytest.mark.parametrize("fault", [*CONFIGS, *TENSORS, *FILES])
def test_a_folder_that_cannot_be_used_is_one_sentence(
    folder: Path, toy_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    message = break_folder(folder, fault)
    for sentence in refusals(folder, toy_folder("llama"), capsys):
        assert any(part in sentence for part in message.split("|")), sentence
    assert not (folder / "run" / "checkpoints").exists()


RIGHT: dict[str, Change] = {
    "as it is": setting(),
    "a block longer than it was trained for": lambda c: (c.update(block_size=16), c["dflash_config"].update(block_size=16)),
    "the block size in one place": without("dflash_config", "block_size"),
    "a whole number for the rotary base": lambda c: (c.pop("rope_parameters"), c.update(rope_theta=10000)),
    "no word on causality": without("is_causal"),
    "keys that mean nothing here": setting(max_window_layers=2, initializer_range=0.02, use_cache=True, eos_token_id=2),
    "another longest text": setting(max_position_embeddings=64),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_folder_that_can_be_used_gives_the_targets_own_text(
    folder: Path, toy_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str], case: str
) -> None:
    config = json.loads((folder / "drafter" / CONFIG_NAME).read_text())
    RIGHT[case](config)
    write_json(folder / "drafter" / CONFIG_NAME, config)
    found = result(capsys, "evaluate", folder / "prompts.jsonl", "--target", toy_folder("llama"), "--drafter", folder / "drafter",
                   "--max-new-tokens", 20)
    assert found["identical"] is True
    assert found["conditions"]["block_size"] == config["block_size"]


def test_training_goes_on_from_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One step away from its weights, not from new ones."""
    before = open_drafter(folder / "drafter", dtype="float32", device="cpu").state_dict()
    trained = cli.train(folder / "run.toml")
    after = open_drafter(folder / "run", dtype="float32", device="cpu").state_dict()
    assert trained["steps"] == 1
    moved = max(float((after[name] - tensor).abs().max()) for name, tensor in before.items())
    assert 0 < moved < 1e-2
