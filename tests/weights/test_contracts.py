"""Exports as SGLang's, vLLM's and speculators' loaders read them: each understands the drafter that was trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import ENGINES, RefusedError, meant
from overfit import random_drafter
from safetensors.torch import load_file, save_file
from test_export import export, save_run
from toys import VOCAB, toy_model, toy_shape, toy_tokenizer

from outrider.files import write_json
from outrider.model.published import CONFIG_NAME, WEIGHTS_NAME
from outrider.records import FULL, SLIDING, DrafterShape
from outrider.weights.serve import serve_commands

LAYERS = 6  # of the toy target
READS = {"sglang": ("hf",), "vllm": ("hf", "speculators"), "speculators": ("speculators",)}
PAIRS = [(engine, form) for engine, forms in READS.items() for form in forms]
SHAPES = {
    "full": toy_shape(rope_theta=5e5), "sliding": toy_shape(layer_types=(SLIDING, SLIDING), sliding_window=6),
    "mixed": toy_shape(layer_types=(FULL, SLIDING), sliding_window=6),
    "sizes": toy_shape(num_layers=3, num_heads=6, num_kv_heads=3, head_dim=8, intermediate_size=40, target_layer_ids=(0, 3),
                       block_size=8, rms_norm_eps=1e-5),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    toy_model("qwen3", seed=0).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def exported(folder: Path, shape: DrafterShape, target: Path, form: str) -> Path:
    run = save_run(folder / "run", random_drafter(shape, seed=0), target=target)
    export(run, folder / "out", None, formats=[form])
    return folder / "out"


def expected(shape: DrafterShape, engine: str) -> Any:
    return meant(shape, block_size=None if engine == "vllm" else shape.block_size)


@pytest.mark.parametrize(("engine", "form"), PAIRS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_engine_understands_the_drafter(tmp_path: Path, target: Path, engine: str, form: str, name: str) -> None:
    """But for one pair: vLLM reads one causality for all layers out of speculators, and no serve command is given for it."""
    shape = SHAPES[name]
    found = ENGINES[engine](exported(tmp_path, shape, target, form), VOCAB, LAYERS)
    if (engine, form, name) == ("vllm", "speculators", "mixed"):
        assert found != expected(shape, engine)
        assert "vllm" not in serve_commands(tmp_path, str(target), shape, {form})
    else:
        assert found == expected(shape, engine)


def in_config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        config = json.loads((folder / CONFIG_NAME).read_text())
        change(config)
        write_json(folder / CONFIG_NAME, config)

    return make


def in_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_NAME)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_NAME)

    return make


PUBLISHED = {
    "ids of layer inputs": lambda c: c["dflash_config"].update(target_layer_ids=[2, 3, 5]),
    "an id past the target": lambda c: c["dflash_config"].update(target_layer_ids=[1, 2, LAYERS]),
    "another mask token": lambda c: c["dflash_config"].update(mask_token_id=3),
    "another rotary base": lambda c: c.update(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "no rotary base": lambda c: (c.pop("rope_theta"), c.pop("rope_parameters")),
    "causal full layers": lambda c: c.update(is_causal=True),
    "sliding in name only": lambda c: c.update(layer_types=[SLIDING, SLIDING], is_causal=False),
    "another epsilon": lambda c: c.update(rms_norm_eps=1e-5),
    "fewer heads": lambda c: c.update(num_attention_heads=2),
}
SPECULATORS = {
    "ids of layer outputs": lambda c: c.update(aux_hidden_state_layer_ids=[1, 2, 4]),
    "another mask token": lambda c: c.update(mask_token_id=3),
    "no rotary base": lambda c: (c["transformer_layer_config"].pop("rope_theta"),
                                 c["transformer_layer_config"].pop("rope_parameters")),
    "a smaller vocabulary": lambda c: c.update(draft_vocab_size=128),
    "another epsilon": lambda c: c["transformer_layer_config"].update(rms_norm_eps=1e-5),
}
WEIGHTS = {
    "a tensor missing": lambda t: t.pop("layers.1.self_attn.q_norm.weight"),
    "a tensor of another name": lambda t: t.update({"model.encoder.weight": t.pop("fc.weight")}),
    "an embedding": lambda t: t.update({"lm_weight": torch.zeros(2)}),
    "another shape": lambda t: t.update({"fc.weight": t["fc.weight"][:, :64].contiguous()}),
}
FAULTS = [
    *((engine, "hf", name, in_config(change)) for engine in ("sglang", "vllm") for name, change in PUBLISHED.items()),
    *((engine, "speculators", name, in_config(change)) for engine in ("vllm", "speculators")
      for name, change in SPECULATORS.items()),
    *((engine, form, name, in_weights(change)) for engine, form in PAIRS for name, change in WEIGHTS.items()),
    ("sglang", "hf", "another block size", in_config(lambda c: c["dflash_config"].update(block_size=8))),
    ("sglang", "hf", "a mask past the vocabulary", in_config(lambda c: c["dflash_config"].update(mask_token_id=VOCAB))),
    ("speculators", "speculators", "another block size", in_config(lambda c: c.update(block_size=8))),
    ("vllm", "speculators", "a draft too long", in_config(lambda c: c.update(block_size=3))),
    ("vllm", "speculators", "causal full layers", in_config(lambda c: c.update(sliding_window_non_causal=False))),
]


@pytest.mark.parametrize(("engine", "form", "name", "fault"), FAULTS, ids=[f"{e}-{f}-{n}" for e, f, n, _ in FAULTS])
def test_a_mismatch_is_noticed(
    tmp_path: Path, target: Path, engine: str, form: str, name: str, fault: Callable[[Path], None]
) -> None:
    """Each fault is one that the engine would meet in silence or stop at; either way the contract is broken."""
    folder = exported(tmp_path, SHAPES["full"], target, form)
    assert ENGINES[engine](folder, VOCAB, LAYERS) == expected(SHAPES["full"], engine)
    fault(folder)
    try:
        found = ENGINES[engine](folder, VOCAB, LAYERS)
    except (RefusedError, KeyError):
        return
    assert found != expected(SHAPES["full"], engine)


def test_a_window_that_is_switched_off_is_noticed(tmp_path: Path, target: Path) -> None:
    """transformers drops sliding_window where use_sliding_window is not true; both engines then stop."""
    folder = exported(tmp_path, SHAPES["sliding"], target, "hf")
    in_config(lambda c: c.update(use_sliding_window=False))(folder)
    for engine in ("sglang", "vllm"):
        with pytest.raises(RefusedError, match="without a window"):
            ENGINES[engine](folder, VOCAB, LAYERS)
