"""The source of features as the run file asks for it: opened, named and checked from a target's folder."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import random_rows

from outrider.config import FeaturesConfig
from outrider.errors import UserError
from outrider.features import source as source_module
from outrider.features.capture import capture
from outrider.features.fp8 import Fp8Linear
from outrider.features.source import OWN, REFERENCE, Order, Provenance, delta_rule_of, open_source, say_kernels
from outrider.features.target import Target, load_target
from outrider.records import PADDING_DOCUMENT

CPU = torch.device("cpu")
IDS = (1, 3)
ROWS = random_rows([[20, 30]], length=60, seed=1)


def opened(folder: Path, tmp_path: Path, **settings: Any) -> source_module.FeatureSource:
    order = Order(str(folder), "float32", "cpu", IDS, last_layer=3)
    return open_source(order, FeaturesConfig(**settings), ROWS, Provenance("target", "rows", 1, tmp_path / "features"))


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "sliding"])
@pytest.mark.parametrize("documents", ["apart", "packed"])
def test_features_as_the_run_file_asks(toy_folder: Callable[..., Path], tmp_path: Path, kind: str, documents: str) -> None:
    source = opened(toy_folder(kind), tmp_path, documents=documents)
    assert len(source.target.layers) == 4, "nothing after the last captured layer"
    whole = load_target(str(toy_folder(kind)), dtype="float32", device="cpu", last_layer=None, head=False)
    truth = capture(whole, ROWS, IDS).values_BSF
    found = source.features(ROWS, CPU).values_BSF
    assert torch.equal(found, truth) if documents == "apart" else float((found - truth).norm() / truth.norm()) < 1e-5


def test_fp8_is_what_features_come_from(
    toy_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = opened(toy_folder("qwen3"), tmp_path).features(ROWS, CPU).values_BSF
    source = opened(toy_folder("qwen3"), tmp_path, precision="fp8")
    assert any(isinstance(module, Fp8Linear) for module in source.target.layers.modules())
    error = float((source.features(ROWS, CPU).values_BSF - exact).norm() / exact.norm())
    assert 1e-3 < error < 0.3
    assert "fp8: 28 linear layers in 8 bits" in capsys.readouterr().err


def test_a_store_on_disk_in_the_runs_folder(
    toy_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    online = opened(toy_folder("llama"), tmp_path).features(ROWS, CPU).values_BSF
    for keep in ("disk", "memory"):
        source = opened(toy_folder("llama"), tmp_path, keep=keep)
        for _ in range(2):
            assert torch.equal(source.features(ROWS, CPU).values_BSF, online)
    assert [p.name for p in (tmp_path / "features").glob("row-*")] == ["row-00000000.safetensors"]
    assert "1 rows of 0.0 MiB, 0.0 GiB still to be written" in capsys.readouterr().err
    with pytest.raises(UserError, match="holds features made for another precision"):
        opened(toy_folder("llama"), tmp_path, keep="disk", precision="fp8")


def test_kernels_are_named_once_and_slow_ones_refused_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ("linear_attention", "full_attention")
    say_kernels("sdpa", kinds, FeaturesConfig(), CPU, REFERENCE)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "attention: torch's scaled_dot_product_attention; gated delta rule: the reference, slow; conv" in said
    with pytest.raises(UserError, match=r"require_fast_kernels = true: .*gated delta rule.*would run on reference code on cpu"):
        say_kernels("sdpa", kinds, FeaturesConfig(require_fast_kernels=True), CPU, REFERENCE)
    with pytest.raises(UserError, match=r"require_fast_kernels = true: attention would run on reference code"):
        say_kernels("eager", ("full_attention",), FeaturesConfig(require_fast_kernels=True), CPU, REFERENCE)


def test_fast_kernels_on_a_gpu(
    toy_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds, cuda = ("linear_attention", "full_attention"), torch.device("cuda")
    packed = FeaturesConfig(documents="packed", require_fast_kernels=True)
    target = toy_target("qwen3_5")
    monkeypatch.setattr(source_module, "has_own_delta_rule", lambda *given: True)
    assert delta_rule_of(target, "packed", cuda) == OWN
    assert delta_rule_of(target, "apart", cuda) == REFERENCE, "those are transformers' layers"
    monkeypatch.setattr(source_module, "_installed", lambda package: package == "fla")
    library = delta_rule_of(target, "apart", cuda)
    assert "flash-linear-attention" in library
    say_kernels("sdpa", kinds, packed, cuda, library)
    assert "reference" not in capsys.readouterr().err
    with pytest.raises(UserError, match="convolution would run on reference code"):
        say_kernels("sdpa", kinds, FeaturesConfig(require_fast_kernels=True), cuda, library)
    with pytest.raises(UserError, match="gated delta nets need flash-linear-attention"):
        say_kernels("sdpa", kinds, FeaturesConfig(documents="packed"), cuda, REFERENCE)


@pytest.mark.parametrize("keep", ["memory", "disk"])
def test_padding_in_place_of_a_row_is_not_kept_as_that_row(toy_folder: Callable[..., Path], tmp_path: Path, keep: str) -> None:
    online = opened(toy_folder("llama"), tmp_path).features(ROWS, CPU).values_BSF
    source = opened(toy_folder("llama"), tmp_path, keep=keep)
    padding = replace(ROWS, document_ids_BS=torch.full_like(ROWS.document_ids_BS, PADDING_DOCUMENT))
    assert not source.features(padding, CPU).values_BSF.any()
    assert torch.equal(source.features(ROWS, CPU).values_BSF, online), "the row can be read again"
