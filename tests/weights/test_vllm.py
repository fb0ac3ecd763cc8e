"""Our export in vLLM itself (`make test-engines`): the target's own text, and our decoder's counts of drafts and acceptances."""

import json
import os
from pathlib import Path

import pytest
import vllm_runs
from engine_cases import BLOCK, LIMIT, PROMPTS, Pairing, greedy, make_pairing

from outrider import cli
from outrider.data.prompts import read_prompts
from outrider.features.target import load_tokenizer
from outrider.model.drafter import Drafter
from outrider.model.published import to_config
from outrider.verify.decode import speculate, target_alone
from outrider.verify.sampling import DecodeOptions
from outrider.weights.export import write_published
from outrider.weights.speculators import to_speculators

PYTHON = os.environ.get("OUTRIDER_ENGINES", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="OUTRIDER_ENGINES names no python with vLLM's CPU build: make test-engines")


@pytest.fixture(scope="module")
def pairing(tmp_path_factory: pytest.TempPathFactory) -> Pairing:
    return make_pairing(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.mark.parametrize(("name", "form"), [("full", "hf"), ("sliding", "hf"), ("full", "speculators")])
def test_same_text_and_counts(tmp_path: Path, pairing: Pairing, name: str, form: str) -> None:
    drafter = pairing.drafter(name)
    if form == "hf":
        config = to_config(drafter.shape, embedding_scale=1.0, softcap=None, dtype="float32")
    else:
        config = to_speculators(drafter.shape, target=str(pairing.folder), architectures=["Qwen3ForCausalLM"], dtype="float32")
    write_published(tmp_path, drafter, config)
    found = vllm_runs.draft(PYTHON, pairing.folder, tmp_path, PROMPTS, drafts=BLOCK - 1, limits=[LIMIT] * len(PROMPTS))
    for prompt, run in zip(PROMPTS, found, strict=True):
        ours = speculate(pairing.target, drafter, prompt, greedy(LIMIT + BLOCK))
        assert run == vllm_runs.expected(ours, limit=LIMIT, drafts=BLOCK - 1)
        assert run.tokens == target_alone(pairing.target, prompt, greedy(LIMIT)).tokens
    assert 0 < found[0].accepted < found[0].drafted, "drafts that are all right or all wrong compare nothing"


def test_the_known_fault_of_the_cpu_build_is_still_the_only_one(tmp_path: Path, pairing: Pairing) -> None:
    """With norms of the second layer's keys far from the first's: counts as our decoder's with that fault, not without."""
    trained = pairing.drafter("full")
    drafter = Drafter(trained.shape, trained.layers[0].self_attn.attention)
    drafter.load_state_dict(trained.state_dict())
    drafter.requires_grad_(False)
    drafter.layers[1].self_attn.k_norm.weight.mul_(-1.5)
    drafter.layers[1].self_attn.q_norm.weight.mul_(-1 / 1.5)  # together they change nothing, unless another norm is taken
    write_published(tmp_path, drafter, to_config(drafter.shape, embedding_scale=1.0, softcap=None, dtype="float32"))
    (found,) = vllm_runs.draft(PYTHON, pairing.folder, tmp_path, PROMPTS[:1], drafts=BLOCK - 1, limits=[LIMIT])
    same, right, wrong = (
        vllm_runs.expected(way(pairing.target, one, PROMPTS[0], greedy(LIMIT + BLOCK)), limit=LIMIT, drafts=BLOCK - 1)
        for way, one in ((speculate, trained), (speculate, drafter), (vllm_runs.speculate_with_its_fault, drafter)))
    assert found == wrong
    assert found.tokens == right.tokens
    assert right == same
    assert right.accepted != wrong.accepted


def test_evaluate_measures_a_running_server(tmp_path: Path, pairing: Pairing) -> None:
    """Over HTTP, against the same server without the drafter: counts are differences of its /metrics, and our decoder's."""
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hello", "1 + 1 =")))
    asked = [one.ids for one in read_prompts(lines, load_tokenizer(str(pairing.folder)), template_options={})]
    drafter = pairing.drafter("full", asked[0])
    (tmp_path / "drafter").mkdir()
    write_published(tmp_path / "drafter", drafter, to_config(drafter.shape, embedding_scale=1.0, softcap=None, dtype="float32"))
    with (vllm_runs.server(PYTHON, pairing.folder, tmp_path / "drafter", drafts=BLOCK - 1, log=tmp_path / "log") as url,
          vllm_runs.server(PYTHON, pairing.folder, None, drafts=0, log=tmp_path / "alone.log") as alone):
        result = cli.evaluate(lines, target=str(pairing.folder), engine="vllm", base_url=url, baseline_url=alone,
                              max_new_tokens=LIMIT)
    stops = DecodeOptions.greedy(max_new_tokens=LIMIT, stop_ids=tuple(result["conditions"]["stop_ids"]))
    counted = []
    for ids in asked:  # it counts what was accepted behind the end of a text too
        longer, text = (speculate(pairing.target, drafter, ids, one) for one in (greedy(LIMIT + BLOCK), stops))
        counted.append(vllm_runs.expected(longer, limit=len(text.tokens), drafts=BLOCK - 1))
    assert result["forwards"] == sum(one.drafts for one in counted)
    assert result["drafted"] == sum(one.drafted for one in counted)
    assert result["accepted"] == sum(one.accepted for one in counted)
    assert 0 < result["accepted"] < result["drafted"]
    assert result["tokens"] == sum(len(one.tokens) for one in counted)
    assert result["identical"] is True
    assert len(result["acceptance_by_slot"]) == BLOCK - 1
    assert result["speedup"] == pytest.approx(result["tokens_per_s"] / result["baseline_tokens_per_s"])
