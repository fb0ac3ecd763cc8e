"""Our export in llama.cpp itself: the target's own greedy text, and as many drafts and accepted tokens as our decoder."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import HALF, STEPS
from llamacpp import ask, expected, llama_server, merging_tokenizer, target_folder
from overfit import overfit_drafter, random_drafter
from toys import EOS, toy_shape

from outrider import cli
from outrider.data.prompts import read_prompts
from outrider.errors import UserError
from outrider.features.target import Target, load_target, load_tokenizer
from outrider.model.drafter import Drafter
from outrider.records import FULL, SLIDING, DrafterShape
from outrider.verify.decode import speculate, target_alone
from outrider.verify.sampling import DecodeOptions
from outrider.weights import gguf
from outrider.weights.gguf import write_gguf
from outrider.weights.selfcheck import check_gguf_file, rounded

pytestmark = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None,
                                reason="llama.cpp is not installed: pip install xllamacpp")
PROMPT = [72, 101, 108, 108, 111, 32, 104]
SHAPES = {"full": toy_shape(), "sliding": toy_shape(layer_types=(SLIDING, SLIDING), sliding_window=6, rope_theta=5e5)}
LIMITS = (2, 5, 6, 24)
DRAFTS = 3
MakeTarget = Callable[[str], tuple[Path, Target]]


@pytest.fixture(scope="module")
def gguf_target(tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    made: dict[str, tuple[Path, Target]] = {}

    def make(kind: str) -> tuple[Path, Target]:
        if kind not in made:
            folder = target_folder(tmp_path_factory.mktemp(kind), kind)
            loaded = load_target(str(folder), dtype="float32", device="cpu", last_layer=None, head=True)
            made[kind] = folder / "target.gguf", loaded
        return made[kind]

    return make


def greedy(limit: int) -> DecodeOptions:
    return DecodeOptions.greedy(max_new_tokens=limit, stop_ids=(EOS,))


def trained(target: Target, shape: DrafterShape, steps: int) -> Drafter:
    """A drafter after `steps` on the text that the target writes after PROMPT, rounded to bf16 as an export is."""
    text = target_alone(target, PROMPT, DecodeOptions.greedy(max_new_tokens=24, stop_ids=())).tokens
    drafter = overfit_drafter(target, shape, (*PROMPT, *text), prompt=len(PROMPT), steps=steps)
    return rounded(drafter, "bfloat16")


def file_of(folder: Path, drafter: Drafter) -> Path:
    path = folder / "drafter.gguf"
    write_gguf(path, drafter, merging_tokenizer(), name="test", dtype=torch.float32)
    return path


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("quality", STEPS)
def test_same_text_and_counts(tmp_path: Path, gguf_target: MakeTarget, kind: str, name: str, quality: str) -> None:
    """At limits around a block's end, on the trained prompt and on another one."""
    file, target = gguf_target(kind)
    drafter = trained(target, SHAPES[name], STEPS[quality][name])
    with llama_server(file, file_of(tmp_path, drafter), drafts=DRAFTS) as address:
        for prompt in (PROMPT, [9, 9, 9]):
            ours = speculate(target, drafter, prompt, greedy(32))
            assert ours.tokens == target_alone(target, prompt, greedy(32)).tokens
            for limit in LIMITS:
                assert ask(address, prompt, limit=limit) == expected(ours, limit=limit, drafts=DRAFTS)
    share = expected(speculate(target, drafter, PROMPT, greedy(32)), limit=24, drafts=DRAFTS)
    assert {"random": share.accepted < 4, HALF: share.accepted >= 4,
            "overfit": share.accepted == share.drafted}[quality]


def test_evaluate_measures_a_running_server(tmp_path: Path, gguf_target: MakeTarget) -> None:
    """Over HTTP, against the same server without the drafter: the counts are the server's own, and those of our decoder."""
    file, target = gguf_target("qwen3")
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": text, "kind": kind}) + "\n" for text, kind in (
        ("Hello there", "greeting"), ("1 + 1", "sum"), ("Hello you", "greeting"))))
    asked = [prompt.ids for prompt in read_prompts(lines, load_tokenizer(str(file.parent)), template_options={})]
    text = target_alone(target, asked[0], greedy(24)).tokens
    drafter = overfit_drafter(target, SHAPES["full"], (*asked[0], *text), prompt=len(asked[0]), steps=40)
    with (llama_server(file, file_of(tmp_path, drafter), drafts=DRAFTS) as address,
          llama_server(file, None, drafts=0) as alone):
        result = cli.evaluate(lines, target=str(file.parent), engine="llamacpp", base_url=address, baseline_url=alone,
                              max_new_tokens=24, page=tmp_path / "page.md")
    counted = [expected(speculate(target, drafter, ids, greedy(32)), limit=24, drafts=DRAFTS) for ids in asked]
    assert result["drafted"] == sum(one.drafted for one in counted)
    assert result["accepted"] == sum(one.accepted for one in counted)
    assert 0 < result["accepted"] < result["drafted"]
    assert result["tau"] == 1 + result["accepted"] / result["forwards"]
    assert result["tokens"] == sum(len(one.tokens) for one in counted)
    assert result["identical"] is True
    assert result["speedup"] == pytest.approx(result["tokens_per_s"] / result["baseline_tokens_per_s"])
    assert "llamacpp at http" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("name", SHAPES)
def test_causality_inside_the_block_is_what_is_written(
    tmp_path: Path, gguf_target: MakeTarget, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A half-trained drafter's drafts change with it: the wrong word in the file gives other counts, the right one ours."""
    file, target = gguf_target("qwen3")
    drafter = trained(target, SHAPES[name], STEPS[HALF][name])
    ours = expected(speculate(target, drafter, PROMPT, greedy(32)), limit=24, drafts=DRAFTS)
    real = gguf.metadata

    def other(*given: Any) -> dict[str, Any]:
        keys = real(*given)
        return {**keys, "dflash.attention.causal": not keys["dflash.attention.causal"]}

    answers = []
    for metadata in (real, other):
        monkeypatch.setattr(gguf, "metadata", metadata)
        with llama_server(file, file_of(tmp_path, drafter), drafts=DRAFTS) as address:
            answers.append(ask(address, PROMPT, limit=24))
    assert answers[0] == ours
    assert 0 < ours.accepted < ours.drafted
    assert answers[1].tokens == ours.tokens
    assert answers[1].accepted != ours.accepted


def test_a_wrong_layer_id_is_seen(tmp_path: Path, gguf_target: MakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids + 1 that llama.cpp wants: with ours as they are it reads the layers below and accepts less."""
    file, target = gguf_target("qwen3")
    drafter = trained(target, SHAPES["full"], STEPS["overfit"]["full"])
    ours = expected(speculate(target, drafter, PROMPT, greedy(32)), limit=24, drafts=DRAFTS)
    real = gguf.metadata
    monkeypatch.setattr(gguf, "metadata", lambda *given: {**real(*given), "dflash.target_layers": [1, 2, 4]})
    with llama_server(file, file_of(tmp_path, drafter), drafts=DRAFTS) as address:
        assert ask(address, PROMPT, limit=24).accepted < ours.accepted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_file_read_back_is_the_drafter(tmp_path: Path, dtype: str) -> None:
    drafter = rounded(random_drafter(SHAPES["sliding"], seed=0), dtype)
    write_gguf(tmp_path / "d.gguf", drafter, merging_tokenizer(), name="test", dtype=getattr(torch, dtype))
    assert check_gguf_file(tmp_path / "d.gguf", drafter, merging_tokenizer()) == []
    other = rounded(random_drafter(SHAPES["sliding"], seed=1), dtype)
    reasons = check_gguf_file(tmp_path / "d.gguf", other, merging_tokenizer())
    assert any("tensor 'fc.weight' differs" in reason for reason in reasons)
    wider = rounded(random_drafter(toy_shape(layer_types=(SLIDING, SLIDING), sliding_window=7, rope_theta=5e5), seed=0), dtype)
    assert check_gguf_file(tmp_path / "d.gguf", wider, merging_tokenizer()) == [
        "d.gguf: dflash.attention.sliding_window is 6, must be 7"]


def test_what_llama_cpp_cannot_draft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="one causality for all layers"):
        gguf.check_gguf(toy_shape(layer_types=(SLIDING, FULL), sliding_window=8), merging_tokenizer())
    unmerged = merging_tokenizer()
    broken = json.loads(unmerged.backend_tokenizer.to_str())
    broken["model"] = {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}
    monkeypatch.setattr(type(unmerged.backend_tokenizer), "to_str", lambda self: json.dumps(broken), raising=False)
    with pytest.raises(UserError, match="type WordLevel"):
        gguf.check_gguf(toy_shape(), unmerged)
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'outrider\[gguf\]'"):
        gguf.check_gguf(toy_shape(), merging_tokenizer())
