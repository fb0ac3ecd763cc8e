"""A small prepared data set and run files for the training tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import MASK, VOCAB, toy_tokenizer

from outrider.config import RunConfig, parse_run
from outrider.data.prepare import PrepareOptions, prepare

MakeRun = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def toy_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few rows of 96 tokens: short conversations of two kinds, several to a row."""
    folder = tmp_path_factory.mktemp("rows")
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as handle:
        for i in range(13):
            messages = [{"role": "user", "content": f"{i}+{i}?"}, {"role": "assistant", "content": f"{i} and {i} is {2 * i}"}]
            if i % 3 == 0:
                messages += [{"role": "user", "content": "ok"}, {"role": "assistant", "content": "bye"}]
            handle.write(json.dumps({"messages": messages}) + "\n")
    options = PrepareOptions(vocab_size=VOCAB, row_length=96, supervise="all", on_bad_record="stop", max_unsupervised_share=0.0,
                             stop_token_ids=(), template_options={})
    prepare([folder / "chats.jsonl"], tokenizer=toy_tokenizer(), out=folder / "rows", options=options)
    return folder / "rows"


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
