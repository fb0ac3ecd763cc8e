"""On a GPU: targets that come quantised give the features that they give on a CPU in float32, within bfloat16's own error."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_quantised_targets import (
    BLOCKS,
    EIGHT,
    FOUR,
    IDS,
    ROWS,
    Write,
    blocks_of_8_bits,
    quantised_folder,
    relative,
    rows_of_4_bits,
    rows_of_8_bits,
)

from outrider.features.capture import capture
from outrider.features.packed import PackedCapture
from outrider.features.target import load_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(("kind", "write", "config"), [
    pytest.param("llama", blocks_of_8_bits, {**BLOCKS, "dequantize": True}, id="fp8, plain once loaded"),
    pytest.param("qwen3", rows_of_4_bits, FOUR, id="compressed-tensors, 4 bits"),
    pytest.param("llama", rows_of_8_bits, EIGHT, id="compressed-tensors, 8 bits with inputs"),
])
def test_features_of_a_quantised_target(tmp_path: Path, kind: str, write: Write, config: dict[str, Any]) -> None:
    """No farther from float32's than half as much again as bfloat16's on the CPU: 0.02 of the norm, and 0.1 where inputs are
    rounded to 8 bits, as one that bfloat16 moves over an edge is then a whole step off."""
    if config in (FOUR, EIGHT):
        pytest.importorskip("compressed_tensors")
    quantised_folder(tmp_path, kind, write, config)

    def loaded(dtype: str, device: str) -> Any:
        return load_target(str(tmp_path), dtype=dtype, device=device, last_layer=max(IDS), head=True)

    exact, rounded = (capture(loaded(dtype, "cpu"), ROWS, IDS).values_BSF for dtype in ("float32", "bfloat16"))
    target = loaded("bfloat16", "cuda")
    apart, packed = capture(target, ROWS, IDS).values_BSF, PackedCapture(target, IDS, compiled=False)
    together = packed(ROWS).values_BSF
    torch.cuda.synchronize()
    began = time.perf_counter()
    packed(ROWS)
    torch.cuda.synchronize()
    by_cpu, *errors = (relative(values.cpu(), exact) for values in (rounded, apart, together))
    print(f"{config['quant_method']}: CPU {by_cpu:.4f}, apart {errors[0]:.4f}, packed {errors[1]:.4f}; packed "
          f"{1e3 * (time.perf_counter() - began):.1f} ms")
    assert max(errors) < 1.5 * by_cpu
