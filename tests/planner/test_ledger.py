"""The ledger: target sizes from a config alone, lines that add up, and what each option does to the peak."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import save_toy
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.config import load_run
from outrider.errors import UserError
from outrider.features.facts import read_facts
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter
from outrider.planner import lines as at
from outrider.planner.drafter_lines import drafter_lines
from outrider.planner.job import Job
from outrider.planner.ledger import capturer, colocated, host, learner
from outrider.planner.lines import lay, line
from outrider.planner.run import job_from
from outrider.planner.target_shapes import read_target_shape, target_shape
from outrider.train.resolve import resolve

BORN_FROM = Path(__file__).parents[2] / "examples" / "born-from.toml"


@pytest.fixture(scope="module")
def born_from() -> Job:
    config = load_run(BORN_FROM, [f"target.path={BORN_FROM.with_suffix('')}"])
    resolved = resolve(config, read_facts(config.target.path))
    return job_from(resolved.config, resolved.shape, row_length=None, suppositions=())


MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {"head_dim": 24}, "mistral": {"head_dim": 16}, "qwen3_moe": {**MOE, "head_dim": 16},
    "qwen3_5_text": {"head_dim": 16, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4,
                     "linear_value_head_dim": 8, "full_attention_interval": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_of_a_target_are_counted_from_its_config(family: str, tmp_path: Path) -> None:
    """Against transformers' own model of the same config. A line missed by one bias of one layer of four would show."""
    values = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 2, "tie_word_embeddings": False, **FAMILIES[family]}
    config = AutoConfig.for_model(family, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ours = target_shape(config.to_dict(), where="here").parameters
    theirs = sum(parameter.numel() for parameter in model.parameters())
    assert ours == pytest.approx(theirs, rel=0.01)


def test_latent_attention_is_refused() -> None:
    with pytest.raises(UserError, match="latent attention"):
        target_shape({"kv_lora_rank": 512, "model_type": "deepseek_v3"}, where="target.path = 'x'")


def test_drafter_weights_are_those_of_the_module(born_from: Job) -> None:
    with torch.device("meta"):
        drafter = Drafter(born_from.drafter, dense_attention)
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    named, shared_out = ({item.name: item.bytes for item in drafter_lines(job)}
                         for job in (born_from, replace(born_from, replicas=4, sharded=True)))
    assert born_from.parameters == parameters
    assert named["drafter: masters"] == pytest.approx(4 * parameters, abs=512)
    assert named["optimizer: both moments"] == pytest.approx(8 * parameters, abs=1024)
    assert "drafter: compute copy" not in named, "it lives in the masters' memory"
    assert shared_out["drafter: compute copy"] == pytest.approx(2 * parameters, abs=512)


@pytest.mark.parametrize(("changes", "moments"), [
    ({}, 8), ({"eight_bit": True}, 2 + 8 / 256), ({"replicas": 2}, 8), ({"replicas": 2, "sharded": True}, 4)], ids=str)
def test_the_host_holds_one_copy_of_what_its_process_writes(born_from: Job, changes: dict[str, Any], moments: float) -> None:
    job = replace(born_from, **changes)
    lines = host(job)
    assert sum(item.bytes for item in lines) == pytest.approx((4 + moments) * job.parameters, abs=4096)
    assert {item.lifetime for item in lines} == {"whole run"}
    assert not {item.name for item in lines} & {item.name for item in colocated(job).lines}, "they are none of the card's"


def test_lines_add_up_phase_by_phase() -> None:
    order = at.phases(1)
    some = [line("a", {"n": 1000}, "float32", at.LOAD, at.LAST), line("b", {"n": 256}, "bfloat16", at.LOSS, at.BACK_LOSS)]
    totals = lay(some, order)
    assert totals[at.LOAD] == totals[at.UPDATE] == 4096  # rounded up to 512 B
    assert totals[at.LOSS] == totals[at.BACK_LOSS] == 4096 + 512
    assert totals[at.forward(0)] == 4096
    with pytest.raises(AssertionError, match="dies in"):
        lay([line("c", {"n": 1}, "bool", at.LOSS, at.LOAD)], order)


def test_what_went_wrong_in_the_born_from_run(born_from: Job) -> None:
    """03-memory-and-kernels: one score matrix of a layer is 16 GiB; the 96 GB drafter card ran out of memory without fusion."""
    unfused = learner(replace(born_from, road="unfused"))
    scores = next(item for item in unfused.at_peak() if "score" in item.name)
    assert scores.bytes == int(6.5 * 8192 * 16384 * 32 * 4)
    assert unfused.device_used_bytes > 94.97 * 2**30 > learner(born_from).device_used_bytes


CHANGES: dict[str, tuple[dict[str, Any], int]] = {
    "unfused": ({"road": "unfused"}, +1), "plain logits": ({"plain_logits": True}, +1),
    "8-bit moments": ({"eight_bit": True}, -1), "accumulation": ({"accumulation": 2}, +1), "prefetch": ({"prefetch": True}, +1),
    "shared out": ({"replicas": 4, "sharded": True}, -1), "FP8 target": ({"fp8": True}, -1),
    "whole target": ({"whole_target": True}, +1),
    "longer rows": ({"row_length": 16384}, +1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_option_moves_the_peak(born_from: Job, change: str) -> None:
    changes, sign = CHANGES[change]
    assert (colocated(replace(born_from, **changes)).peak_bytes - colocated(born_from).peak_bytes) * sign > 2**20


def test_the_whole_job_fits_one_card_with_room(born_from: Job) -> None:
    """Target and drafter on one card, goals of the project: 76 GiB in bf16, 54 with an FP8 target."""
    assert colocated(born_from).peak_bytes <= 76 * 2**30
    assert colocated(replace(born_from, fp8=True)).peak_bytes <= 54 * 2**30


def test_fewer_anchors_help_where_activations_fill_the_card(born_from: Job) -> None:
    """Fused, the fullest moment is the one with both gradients of all weights, and anchors do not move it."""
    for road, helps in (("unfused", True), ("fused", False)):
        few, many = (learner(replace(born_from, road=road, anchors=n)).peak_bytes for n in (128, 512))
        assert (few < 0.6 * many) is helps


def test_a_pair_holds_what_one_card_holds_and_the_ends_twice(born_from: Job) -> None:
    one, learn, capture = (make(born_from) for make in (colocated, learner, capturer))
    assert learn.device_used_bytes < one.device_used_bytes
    assert capture.standing_bytes < one.standing_bytes
    ends = 2 * 2 * born_from.target.vocab_size * born_from.target.hidden_size
    assert learn.standing_bytes + capture.standing_bytes == pytest.approx(one.standing_bytes + ends / 2, rel=0.01)


def test_a_local_folder_is_read(tmp_path: Path) -> None:
    folder = save_toy(tmp_path / "toy", "qwen3", seed=0, dtype=torch.float32, layers=5, tie=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert read_target_shape(str(folder)).parameters == sum(parameter.numel() for parameter in model.parameters())
