"""Our export in vLLM itself (`make test-engines`): the target's own text, and our decoder's counts of drafts and acceptances."""

import os
from pathlib import Path

import pytest
import vllm_runs
from engine_cases import BLOCK, LIMIT, PROMPTS, Pairing, greedy, make_pairing

from outrider.model.published import to_config
from outrider.verify.decode import speculate, target_alone
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
    found = vllm_runs.draft(PYTHON, pairing.folder, tmp_path, PROMPTS, drafts=BLOCK - 1, limit=LIMIT)
    for prompt, run in zip(PROMPTS, found, strict=True):
        ours = speculate(pairing.target, drafter, prompt, greedy(LIMIT + BLOCK))
        assert run == vllm_runs.expected(ours, limit=LIMIT, drafts=BLOCK - 1)
        assert run.tokens == target_alone(pairing.target, prompt, greedy(LIMIT)).tokens
    assert 0 < found[0].accepted < found[0].drafted, "drafts that are all right or all wrong compare nothing"
