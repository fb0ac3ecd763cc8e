"""Targets whose weights come quantised: read as transformers reads them, captured from as they run, packed or apart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_source import opened
from torch import Tensor
from toys import random_rows, save_toy
from transformers.models.llama.modeling_llama import LlamaMLP

from outrider.errors import UserError
from outrider.features.capture import capture
from outrider.features.fp8 import quantise_rows
from outrider.features.packed import PackedCapture
from outrider.features.target import Target, load_target

IDS = (0, 2, 4)
ROWS = random_rows([[20, 3, 30]], length=56, seed=0)
BLOCK = 16  # weights that share a scale, in a row (4 bits) or in a square (8 bits)
EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
Write = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]  # name and weight: what stands in the file, what it stands for


def quantised_folder(folder: Path, kind: str, write: Write, config: dict[str, Any]) -> dict[str, Tensor]:
    """A toy target with the layers' projections as `write` has them; gives the weights that they stand for, by name."""
    save_toy(folder, kind, seed=0, dtype=torch.bfloat16, layers=6, tie=False)
    file, meant, written = folder / "model.safetensors", {}, {}
    for name, weight in load_file(file).items():
        if name.endswith("_proj.weight"):
            tensors, meant[name] = write(name, weight.float())
            written.update(tensors)
        else:
            written[name] = weight
    save_file(written, file, metadata={"format": "pt"})
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, "quantization_config": config}))
    return meant


def of_meant_weights(folder: Path, meant: dict[str, Tensor], kind: str) -> Tensor:
    """Features of the same target with plain weights, those that the quantised ones stand for."""
    save_toy(folder, kind, seed=0, dtype=torch.bfloat16, layers=6, tie=False)
    target = loaded(folder)
    for name, parameter in target.model.named_parameters():
        if name in meant:
            parameter.data.copy_(meant[name])
    return capture(target, ROWS, IDS).values_BSF


def loaded(folder: Path) -> Target:
    return load_target(str(folder), dtype="float32", device="cpu", last_layer=max(IDS), head=True)


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found.float() - truth.float()).norm() / truth.float().norm())


def blocks_of_8_bits(name: str, weight_ND: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """e4m3 with a scale a square block, as DeepSeek's and Qwen's FP8 releases have it."""
    N, D = weight_ND.shape
    squares = weight_ND.reshape(N // BLOCK, BLOCK, D // BLOCK, BLOCK)
    scale = squares.abs().amax(dim=(1, 3)) / 448
    eight = (squares / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return ({name: eight.reshape(N, D), f"{name}_scale_inv": scale}, (eight.float() * scale[:, None, :, None]).reshape(N, D))


def rows_of_8_bits(name: str, weight_ND: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """e4m3 with a scale a row, as compressed-tensors' "float-quantized" has it."""
    eight, scale = quantise_rows(weight_ND)
    scale = scale.to(torch.bfloat16)
    return {name: eight, f"{name}_scale": scale}, eight.float() * scale.float()


def rows_of_4_bits(name: str, weight_ND: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Whole numbers of 4 bits, eight to an int32, a scale a group: "pack-quantized", what AWQ and GPTQ recipes write."""
    N, D = weight_ND.shape
    groups = weight_ND.reshape(N, D // BLOCK, BLOCK)
    scale = (groups.abs().amax(dim=-1) / 7).to(torch.bfloat16)
    four = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    nibbles = (four.reshape(N, D // 8, 8) + 8).long() << (4 * torch.arange(8))
    packed = ((nibbles.sum(dim=-1) + 2**31) % 2**32 - 2**31).to(torch.int32)
    stem = name.removesuffix("weight")
    tensors = {f"{stem}weight_packed": packed, f"{stem}weight_scale": scale, f"{stem}weight_shape": torch.tensor([N, D])}
    return tensors, (four * scale.float()[..., None]).reshape(N, D)


def compressed(format_name: str, **scheme: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": format_name, "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], **scheme}}}


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
FOUR = compressed("pack-quantized", weights={"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                                             "group_size": BLOCK})
EIGHT = compressed("float-quantized", weights={**EIGHT_BITS, "strategy": "channel", "dynamic": False},
                   input_activations={**EIGHT_BITS, "strategy": "token", "dynamic": True})


@pytest.mark.parametrize(("kind", "write", "config"), [
    pytest.param("llama", blocks_of_8_bits, BLOCKS, id="fp8"),
    pytest.param("qwen3_5", blocks_of_8_bits, BLOCKS, id="fp8, hybrid"),
    pytest.param("qwen3", rows_of_4_bits, FOUR, id="4 bits"),
])
def test_features_are_those_of_the_weights_that_the_file_means(
    tmp_path: Path, kind: str, write: Write, config: dict[str, Any]
) -> None:
    """On a CPU, where transformers brings them back to plain ones: bit for bit apart, to float32's rounding packed."""
    if config is FOUR:
        pytest.importorskip("compressed_tensors")
    meant = quantised_folder(tmp_path / "quantised", kind, write, config)
    target = loaded(tmp_path / "quantised")
    assert target.facts.quantised == config["quant_method"]
    values, plain = capture(target, ROWS, IDS).values_BSF, of_meant_weights(tmp_path / "plain", meant, kind)
    assert torch.equal(values, plain)
    assert relative(PackedCapture(target, IDS, compiled=False)(ROWS).values_BSF, values) < 1e-5


def test_inputs_in_8_bits_stay_so_when_documents_are_packed(tmp_path: Path) -> None:
    """A layer that quantises its inputs looks like a plain one; joined with others it would lose that: 0.1 of the norm."""
    pytest.importorskip("compressed_tensors")
    meant = quantised_folder(tmp_path / "quantised", "llama", rows_of_8_bits, EIGHT)
    target = loaded(tmp_path / "quantised")
    values, plain = capture(target, ROWS, IDS).values_BSF, of_meant_weights(tmp_path / "plain", meant, "llama")
    assert relative(values, plain) > 0.05, "what the inputs' 8 bits do"
    assert relative(PackedCapture(target, IDS, compiled=False)(ROWS).values_BSF, values) < 0.01


@pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")
@pytest.mark.parametrize("bits", [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}])
def test_bitsandbytes(tmp_path: Path, bits: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    save_toy(tmp_path / "plain", "llama", seed=0, dtype=torch.bfloat16, layers=6, tie=False)
    config = BitsAndBytesConfig(**bits, bnb_4bit_compute_dtype=torch.bfloat16)
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, device_map={"": "cpu"}, dtype=torch.bfloat16
    ).save_pretrained(tmp_path / "quantised")
    target = loaded(tmp_path / "quantised")
    assert type(target.layers[0].self_attn.q_proj).__module__.startswith("bitsandbytes")
    values = capture(target, ROWS, IDS).values_BSF
    assert 0.01 < relative(values, capture(loaded(tmp_path / "plain"), ROWS, IDS).values_BSF) < 0.6
    assert relative(PackedCapture(target, IDS, compiled=False)(ROWS).values_BSF, values) < 0.05


def test_the_run_says_that_the_target_is_quantised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised_folder(tmp_path / "quantised", "llama", blocks_of_8_bits, BLOCKS)
    source = opened(tmp_path / "quantised", tmp_path)
    assert len(source.target.layers) == 4
    assert "target: its weights are quantised (fp8)" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"the target is quantised already \(fp8\)"):
        opened(tmp_path / "quantised", tmp_path, precision="fp8")


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    save_toy(tmp_path / "awq", "llama", seed=0, dtype=torch.bfloat16, layers=6, tie=False)
    facts = json.loads((tmp_path / "awq" / "config.json").read_text())
    awq = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    (tmp_path / "awq" / "config.json").write_text(json.dumps({**facts, "quantization_config": awq}))
    with pytest.raises(UserError, match=r"the weights cannot be loaded: Loading an AWQ quantized model requires gptqmodel"):
        loaded(tmp_path / "awq")


def test_kernels_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers asks for FP8's on a GPU, in the first forward."""
    save_toy(tmp_path, "llama", seed=0, dtype=torch.bfloat16, layers=6, tie=False)

    def asks(module: object, *args: object, **options: object) -> None:
        raise ImportError("fp8 needs the kernels package: pip install kernels\nmore")

    monkeypatch.setattr(LlamaMLP, "forward", asks)
    with pytest.raises(UserError, match=r"its layers cannot run here: fp8 needs the kernels package: pip install kernels$"):
        loaded(tmp_path)
