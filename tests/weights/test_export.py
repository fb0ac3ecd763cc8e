"""Export: what is written is the checkpoint's drafter for its target, or nothing is written."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ORIGIN, save_checkpoint
from overfit import random_drafter
from safetensors import safe_open
from toys import VOCAB, toy_shape
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from outrider.errors import UserError
from outrider.features.target import load_target
from outrider.model.attention import rotary_table
from outrider.model.drafter import Drafter
from outrider.model.published import CONFIG_NAME, WEIGHTS_NAME, tensor_shapes, to_config
from outrider.records import FULL, SLIDING, DrafterShape
from outrider.train.checkpoint import Position
from outrider.weights import export as export_module
from outrider.weights.card import CARD_NAME
from outrider.weights.opening import open_drafter, scale_of_embedding
from outrider.weights.serve import serve_commands

ToyFolder = Callable[..., Path]


def export(checkpoint: Path, out: Path, target: str | None, **changes: Any) -> dict[str, Any]:
    """The verb, with its defaults unless changed."""
    return export_module.export(checkpoint, out, target, **{"formats": ["hf"], "dtype": "bfloat16", "golden": False, **changes})


def save_run(folder: Path, drafter: Drafter, *, target: Path, step: int = 1) -> Path:
    """A run folder with one checkpoint of `drafter`."""
    drafter.requires_grad_(True)
    optimizer = torch.optim.AdamW(drafter.parameters())
    config = to_config(drafter.shape, embedding_scale=1.0, softcap=None, dtype="bfloat16")
    origin = replace(ORIGIN, target=str(target), drafter_config=config)
    save_checkpoint(folder, drafter, optimizer, Position(step=step), origin=origin)
    return folder


@pytest.mark.parametrize("shape", [
    toy_shape(), toy_shape(layer_types=(SLIDING, FULL), sliding_window=8),
    toy_shape(layer_types=(SLIDING, SLIDING), sliding_window=4), toy_shape(rope_theta=1e6, block_size=8),
], ids=["full", "mixed", "sliding", "values"])
def test_an_export_holds_the_drafter(tmp_path: Path, toy_folder: ToyFolder, shape: DrafterShape) -> None:
    drafter = random_drafter(shape, seed=0)
    result = export(save_run(tmp_path / "run", drafter, target=toy_folder("llama")), tmp_path / "out", None)
    assert result["folder"] == str(tmp_path / "out")
    assert result["selfcheck"] is True
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [CARD_NAME, CONFIG_NAME, WEIGHTS_NAME]
    with safe_open(tmp_path / "out" / WEIGHTS_NAME, framework="pt") as file:
        assert set(file.keys()) == set(tensor_shapes(shape))
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    assert open_drafter(tmp_path / "out", dtype="float32", device="cpu").shape == shape


def test_open_drafter_knows_run_checkpoint_and_export(tmp_path: Path, toy_folder: ToyFolder) -> None:
    old, new = random_drafter(toy_shape(), seed=0), random_drafter(toy_shape(), seed=1)
    for step, drafter in ((9, old), (10, new)):
        run = save_run(tmp_path / "run", drafter, target=toy_folder("llama"), step=step)
    export(run, tmp_path / "out", None)
    exact = new.state_dict()
    for path in (run, run / "checkpoints" / "step-00000010"):
        loaded = open_drafter(path, dtype="float32", device="cpu").state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in exact.items())
    rounded = open_drafter(tmp_path / "out", dtype="float32", device="cpu").state_dict()
    assert all(torch.equal(rounded[name], tensor.bfloat16().float()) for name, tensor in exact.items())


@pytest.mark.parametrize("name", ["drafter/model.safetensors", "state.json"])
def test_a_checkpoint_cut_in_half_is_refused(tmp_path: Path, toy_folder: ToyFolder, name: str) -> None:
    run = save_run(tmp_path / "run", random_drafter(toy_shape(), seed=0), target=toy_folder("llama"))
    file = run / "checkpoints" / "step-00000001" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r"damaged|state\.json: the checkpoint's state is not valid JSON"):
        export(run, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"vocab_size": VOCAB + 8}, {"num_target_layers": 8}], ids=str)
def test_another_target_is_refused(tmp_path: Path, toy_folder: ToyFolder, change: dict[str, Any]) -> None:
    run = save_run(tmp_path / "run", random_drafter(toy_shape(**change), seed=0), target=tmp_path)
    with pytest.raises(UserError, match=f"is {next(iter(change.values()))}, this target's is"):
        export(run, tmp_path / "out", str(toy_folder("llama")))


def break_weights(folder: Path, drafter: Drafter, config: dict[str, Any]) -> None:
    other = Drafter(drafter.shape, drafter.layers[0].self_attn.attention)
    other.load_state_dict(drafter.state_dict())
    with torch.no_grad():
        other.layers[1].self_attn.k_norm.weight[3] *= 1.05
    REAL_WRITE(folder, other, config)


REAL_WRITE = export_module.write_published
DFLASH = {"block_size": 4, "mask_token_id": 260}


def with_config(**changes: Any) -> Callable[[Path, Drafter, dict[str, Any]], None]:
    return lambda folder, drafter, config: REAL_WRITE(folder, drafter, {**config, **changes})


FAULTS: dict[str, tuple[Callable[[Path, Drafter, dict[str, Any]], None], str]] = {
    "theta": (with_config(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "its shape is"),
    "leaked rotary factor": (with_config(partial_rotary_factor=0.5), "cannot be loaded.*partial_rotary_factor"),
    "layer ids": (with_config(dflash_config={**DFLASH, "target_layer_ids": [0, 2, 4]}), "its shape is"),
    "no layer ids": (with_config(dflash_config=DFLASH), "cannot be loaded"),
    "leaked key": (with_config(layer_scale=0.5), "the key 'layer_scale', which is not on the allow-list"),
    "vocabulary": (with_config(vocab_size=VOCAB + 1), "its shape is"),
    "weights": (break_weights, "hidden states differ"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_selfcheck_writes_nothing(
    tmp_path: Path, toy_folder: ToyFolder, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    run = save_run(tmp_path / "run", random_drafter(toy_shape(), seed=0), target=toy_folder("llama"))
    before = export(run, tmp_path / "out", None)
    kept = {p.name: p.read_bytes() for p in Path(before["folder"]).iterdir()}
    write, reason = FAULTS[fault]
    monkeypatch.setattr(export_module, "write_published", write)
    for out in (tmp_path / "out", tmp_path / "new"):
        with pytest.raises(RuntimeError, match=f"failed its self-check.*{reason}"):
            export(run, out, None)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


def test_weights_in_another_dtype_fail_the_selfcheck(
    tmp_path: Path, toy_folder: ToyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(export_module.DTYPES, "bfloat16", torch.float16)
    run = save_run(tmp_path / "run", random_drafter(toy_shape(), seed=0), target=toy_folder("llama"))
    with pytest.raises(RuntimeError, match=r"tensor 'fc.weight' is \('F16'"):
        export(run, tmp_path / "out", None)


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path, toy_folder: ToyFolder) -> None:
    run, out = save_run(tmp_path / "run", random_drafter(toy_shape(), seed=0), target=toy_folder("llama")), tmp_path / "out"
    out.mkdir()
    export(run, out, None)
    export(run, out, None)  # an earlier export is
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds other files \('thesis.tex'\)"):
        export(run, out, None)
    assert (out / "thesis.tex").exists()
    with pytest.raises(UserError, match="is a file"):
        export(run, out / "thesis.tex", None)


def test_an_export_is_not_exported_again(tmp_path: Path, toy_folder: ToyFolder) -> None:
    export(save_run(tmp_path / "run", random_drafter(toy_shape(), seed=0), target=toy_folder("llama")), tmp_path / "out", None)
    with pytest.raises(UserError, match="is an exported drafter already"):
        export(tmp_path / "out", tmp_path / "again", str(toy_folder("llama")))


def test_a_models_folder_is_no_run(tmp_path: Path, toy_folder: ToyFolder) -> None:
    with pytest.raises(UserError, match=r"llama.*: is a model's folder, not a drafter's: name a run \(its train.folder\)"):
        export(toy_folder("llama"), tmp_path / "out", None)


def test_serve_commands_count_the_block_as_each_engine_does() -> None:
    commands = serve_commands(Path("/models/my drafter"), "org/target", toy_shape(block_size=8), {"hf", "gguf"})
    assert commands["vllm"] == (
        "vllm serve org/target --speculative-config "
        """'{"method": "dflash", "model": "/models/my drafter", "num_speculative_tokens": 7}'""")
    assert commands["sglang"] == (
        "python -m sglang.launch_server --model-path org/target --speculative-algorithm DFLASH "
        "--speculative-draft-model-path '/models/my drafter' --speculative-num-draft-tokens 8")
    assert commands["llamacpp"] == (
        "llama-server --model target.gguf --model-draft '/models/my drafter/drafter.gguf' --spec-type draft-dflash "
        "--spec-draft-n-max 7")
    mixed = toy_shape(layer_types=(SLIDING, FULL), sliding_window=8)
    assert "vllm" not in serve_commands(Path("d"), "t", mixed, {"hf"})
    assert set(serve_commands(Path("d"), "t", toy_shape(), {"gguf"})) == {"llamacpp"}


def test_a_target_that_scales_its_embedding_is_told(tmp_path: Path, toy_folder: ToyFolder) -> None:
    config = Gemma3TextConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
                              num_key_value_heads=2, head_dim=16, final_logit_softcapping=30.0, max_position_embeddings=512,
                              sliding_window=5, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    Gemma3ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    target = load_target(str(tmp_path / "gemma"), dtype="float32", device="cpu", last_layer=None, head=True)
    ids = torch.arange(5)
    table_VD = target.model.get_input_embeddings().weight
    torch.testing.assert_close(target.embed(ids), table_VD[ids] * scale_of_embedding(str(tmp_path / "gemma")))
    assert scale_of_embedding(str(toy_folder("llama"))) == 1.0
    export(save_run(tmp_path / "run", random_drafter(toy_shape(), seed=0), target=tmp_path / "gemma"), tmp_path / "out", None)
    dflash = json.loads((tmp_path / "out" / CONFIG_NAME).read_text())["dflash_config"]
    assert (dflash["input_embedding_scale"], dflash["final_logit_softcapping"]) == (32**0.5, 30.0)


def test_cos_and_sin_of_the_saved_config_are_those_of_training(
    tmp_path: Path, toy_folder: ToyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that turns by another angle than its config says drafts well here and nowhere else (04-pitfalls, 11)."""
    run = save_run(tmp_path / "run", random_drafter(toy_shape(), seed=0), target=toy_folder("llama"))
    monkeypatch.setattr(Drafter, "rotary", lambda self, positions_BX: rotary_table(positions_BX, self.shape.head_dim, 20000.0))
    with pytest.raises(RuntimeError, match=r"cos and sin rebuilt from config.json differ"):
        export(run, tmp_path / "out", None)
