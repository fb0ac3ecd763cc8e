"""Run files for the training tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import MASK

from outrider.config import RunConfig, parse_run

MakeRun = Callable[..., RunConfig]


@pytest.fixture
def make_run(toy_folder: Callable[..., Path], toy_rows: Path, tmp_path: Path) -> MakeRun:
    """`make_run(name, **{"section.key": value})`: a run of 10 steps on the toy llama in a folder of that name."""

    def make(name: str = "run", **changes: Any) -> RunConfig:
        document: dict[str, dict[str, Any]] = {
            "target": {"path": str(toy_folder("llama")), "dtype": "float32"},
            "data": {"rows": str(toy_rows)},
            "drafter": {"num_layers": 2, "block_size": 4, "mask_token_id": MASK, "target_layer_ids": [1, 2, 4]},
            "layout": {"anchors": 12, "document_floor": 2},
            "optimizer": {"learning_rate": 3e-3},
            "train": {"folder": str(tmp_path / name), "steps": 10, "rows_per_batch": 2, "accumulation": 2},
            "checkpoint": {"every": 5},
        }
        for key, value in changes.items():
            section, field = key.split(".")
            document.setdefault(section, {})[field] = value
        return parse_run(document, where="test")

    return make
