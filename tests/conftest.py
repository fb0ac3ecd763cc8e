"""Fixtures for all tests: one thread, toy targets and rows made once a session."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toys import VOCAB, save_toy, toy_tokenizer

from outrider.data.prepare import PrepareOptions, prepare
from outrider.features.target import Target, load_target

ToyFolder = Callable[..., Path]
ToyTarget = Callable[..., Target]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Toy tensors gain nothing from threads: 6 us of work met 9 ms of waiting on a busy 2-core machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> ToyFolder:
    """`toy_folder(kind="llama", seed=0, dtype="float32", layers=6, tie=False)`: a target folder, read only by agreement."""
    made: dict[tuple[object, ...], Path] = {}

    def make(kind: str = "llama", *, seed: int = 0, dtype: str = "float32", layers: int = 6, tie: bool = False) -> Path:
        key = (kind, seed, dtype, layers, tie)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-{seed}-{dtype}")
            made[key] = save_toy(folder, kind, seed=seed, dtype=getattr(torch, dtype), layers=layers, tie=tie)
        return made[key]

    return make


@pytest.fixture(scope="session")
def toy_target(toy_folder: ToyFolder) -> ToyTarget:
    """As `toy_folder`, but loaded: a frozen Target, shared by all tests of the session."""
    loaded: dict[tuple[object, ...], Target] = {}

    def make(kind: str = "llama", *, seed: int = 0, dtype: str = "float32", layers: int = 6, tie: bool = False) -> Target:
        key = (kind, seed, dtype, layers, tie)
        if key not in loaded:
            folder = toy_folder(kind, seed=seed, dtype=dtype, layers=layers, tie=tie)
            loaded[key] = load_target(str(folder), dtype=dtype, device="cpu", last_layer=None, head=True)
        return loaded[key]

    return make


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
                             max_bad_share=1.0, stop_token_ids=(), template_options={})
    prepare([folder / "chats.jsonl"], tokenizer=toy_tokenizer(), out=folder / "rows", options=options)
    return folder / "rows"
