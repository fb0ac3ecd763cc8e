"""Continued training: a fresh run begins from a trained drafter of any form, or says in one sentence why it does not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import VOCAB, save_toy

from outrider import cli
from outrider.config import RunConfig, to_toml
from outrider.errors import UserError
from outrider.files import write_json
from outrider.model.published import CONFIG_NAME, WEIGHTS_NAME
from outrider.train.checkpoint import list_checkpoints
from outrider.weights.export import export
from outrider.weights.opening import open_drafter

MakeRun = Callable[..., RunConfig]
STILL = {"optimizer.learning_rate": 1e-30, "train.steps": 1}  # moves no weight


@pytest.fixture
def begin(tmp_path: Path) -> Callable[[RunConfig], dict[str, Any]]:
    """`outrider train` on a run."""

    def go(run: RunConfig) -> dict[str, Any]:
        (tmp_path / "run.toml").write_text(to_toml(run))
        return cli.train(tmp_path / "run.toml")

    return go


@pytest.fixture
def first(make_run: MakeRun, begin: Callable[[RunConfig], Any]) -> RunConfig:
    run = make_run("first", **{"train.steps": 3})
    begin(run)
    return run


def folder_of(form: str, run: RunConfig, out: Path) -> Path:
    """The drafter of a run: the run itself, its checkpoint, or an export."""
    if form in ("hf", "speculators"):
        export(run.train.folder, out, None, formats=[form], dtype="float32", golden=False)
        return out
    return run.train.folder if form == "run" else list_checkpoints(run.train.folder)[-1]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return open_drafter(path, dtype="float32", device="cpu").state_dict()


@pytest.mark.parametrize("form", ["run", "checkpoint", "hf", "speculators"])
def test_a_run_begins_where_the_drafter_ended(
    tmp_path: Path, make_run: MakeRun, begin: Callable[[RunConfig], Any], first: RunConfig, form: str
) -> None:
    folder = folder_of(form, first, tmp_path / "out")
    run = make_run("second", **STILL, **{"train.init_from": str(folder)})
    begin(run)
    before, after = weights(folder), weights(run.train.folder)
    assert all(torch.equal(before[name], after[name]) for name in before)
    scratch = make_run("scratch", **STILL)
    begin(scratch)
    assert not torch.equal(weights(scratch.train.folder)["fc.weight"], before["fc.weight"])


def test_a_resumed_run_does_not_open_it_again(
    tmp_path: Path, make_run: MakeRun, begin: Callable[[RunConfig], Any], first: RunConfig
) -> None:
    """The drafter is gone, and the run goes on to the same bits; another one named there is refused."""
    folder = folder_of("hf", first, tmp_path / "out")
    run = make_run("second", **{"train.init_from": str(folder)})
    begin(run)
    whole = weights(run.train.folder)
    shutil.rmtree(folder)
    shutil.rmtree(list_checkpoints(run.train.folder)[-1])
    assert begin(run)["steps"] == 10
    assert all(torch.equal(whole[name], tensor) for name, tensor in weights(run.train.folder).items())
    with pytest.raises(UserError, match=r"another run file \(train.init_from \("):
        begin(make_run("second", **{"train.init_from": str(tmp_path / "other")}))


RUN_FIELDS = {
    "drafter.block_size": (8, "drafter.block_size is 4 there, 8 here: set them in the run file"),
    "drafter.mask_token_id": (261, "drafter.mask_token_id is 260 there, 261 here"),
    "drafter.target_layer_ids": ([0, 2, 4], r"drafter.target_layer_ids is \[1, 2, 4\] there, \[0, 2, 4\] here"),
    "drafter.num_layers": (3, "drafter.num_layers is 2 there, 3 here; drafter.layer_types is"),
    "drafter.num_heads": (2, "drafter.num_heads is 4 there, 2 here"),
    "drafter.rope_theta": (5e5, "drafter.rope_theta is 10000.0 there, 500000.0 here"),
    "drafter.intermediate_size": (40, "drafter.intermediate_size is 48 there, 40 here"),
    "train.init_from": ("/no/where", "there is no such folder"),
}


@pytest.mark.parametrize("field", RUN_FIELDS)
def test_a_run_that_does_not_fit_is_refused(
    make_run: MakeRun, begin: Callable[[RunConfig], Any], first: RunConfig, field: str
) -> None:
    value, message = RUN_FIELDS[field]
    run = make_run("second", **{"train.init_from": str(first.train.folder), field: value})
    with pytest.raises(UserError, match=message):
        begin(run)
    assert not run.train.folder.exists() or not list(run.train.folder.iterdir())


CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"hidden_size": 64}, "tensor 'fc.weight' has shape|hidden size is 64"),
    "vocabulary": ({"vocab_size": VOCAB + 1}, f"whose vocabulary is {VOCAB + 1}, this target's is {VOCAB}"),
    "depth": ({"num_target_layers": 9}, "whose number of layers is 9, this target's is 6"),
    "norm": ({"rms_norm_eps": 1e-5}, "whose norm epsilon is 1e-05"),
}
TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (lambda t: t.pop("norm.weight"), "lacks tensor 'norm.weight'"),
    "extra": (lambda t: t.update({"lm_head.weight": torch.zeros(2)}), "has the unknown tensor 'lm_head.weight'"),
    "quantised": (lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.int8)}), "tensor 'norm.weight' is int8"),
}


@pytest.mark.parametrize("fault", [*CONFIG, *TENSORS])
def test_a_folder_that_does_not_fit_is_refused(
    tmp_path: Path, make_run: MakeRun, begin: Callable[[RunConfig], Any], first: RunConfig, fault: str
) -> None:
    folder = folder_of("hf", first, tmp_path / "out")
    if fault in CONFIG:
        values, message = CONFIG[fault]
        write_json(folder / CONFIG_NAME, {**json.loads((folder / CONFIG_NAME).read_text()), **values})
    else:
        change, message = TENSORS[fault]
        tensors = load_file(folder / WEIGHTS_NAME)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_NAME)
    with pytest.raises(UserError, match=message):
        begin(make_run("second", **{"train.init_from": str(folder)}))


@pytest.mark.parametrize("form", ["checkpoint", "speculators"])
def test_a_target_of_the_same_sizes_is_told_apart(
    tmp_path: Path, make_run: MakeRun, begin: Callable[[RunConfig], Any], first: RunConfig, form: str
) -> None:
    """By its fingerprint, where the folder has one: the published format has none."""
    folder = folder_of(form, first, tmp_path / "out")
    other = save_toy(tmp_path / "other", "llama", seed=7, dtype=torch.float32, layers=6, tie=False)
    with pytest.raises(UserError, match="was trained on another target"):
        begin(make_run("second", **{"train.init_from": str(folder), "target.path": str(other)}))


@pytest.mark.parametrize("form", ["hf", "speculators"])
def test_evaluate_takes_it_too(tmp_path: Path, first: RunConfig, form: str) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1?"}\n')
    result = cli.evaluate(tmp_path / "prompts.jsonl", target=first.target.path, max_new_tokens=8,
                          drafter=folder_of(form, first, tmp_path / "out"))
    assert result["identical"] is True
