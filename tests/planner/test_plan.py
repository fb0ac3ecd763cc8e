"""Placements: what fits, in which order, what to change; and the verb that prints them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from test_ledger import BORN_FROM, born_from  # noqa: F401 - the fixture

from outrider import cli
from outrider.errors import UserError
from outrider.planner.gpus import CATALOGUE, parse_gpus
from outrider.planner.job import Job
from outrider.planner.ledger import colocated
from outrider.planner.plan import PLACEMENTS, Plan, make_plans, nearest_that_fits, slower
from outrider.show import show_plan

CARDS = "4x rtx-pro-6000"


def planned(**options: Any) -> dict[str, Any]:
    return cli.plan(BORN_FROM, **{
        "gpus": CARDS, "settings": [f"target.path={BORN_FROM.with_suffix('')}"], "placement": None, "row_length": None,
        "suppose": None, "as_given": False, "explain": False, **options})


TWO = {"train.accumulation": 2}  # the least for two learners; the run file has 1


def every(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [result, *result["alternatives"]]


# The born-from job, sentence by sentence: what four cards, two pairs, could and could not do


def test_uncompiled_two_pairs_do_not_fit_by_the_score_matrices_whose_bytes_are_stated(capsys: pytest.CaptureFixture[str]) -> None:
    result = planned(placement="pairs", suppose=["unfused-attention"])
    pairs = next(plan for plan in every(result) if plan["placement"].startswith("2 pairs") and plan["changes"] == TWO)
    scores = 4 * 32 * 8192 * 16384  # fp32, heads x queries x keys: 16 GiB a layer
    assert not pairs["fits"]
    assert pairs["headroom_bytes"] < -48 * 2**30
    assert f"most of all 'attention: score matrices', 104.0 GiB ({int(6.5 * scores):,} bytes)" in pairs["verdict"]
    assert "learn card in 'backward: layer 5, attention'" in pairs["verdict"]
    show_plan(result)
    assert pairs["verdict"] in capsys.readouterr().out  # though with fewer anchors it fits, and that comes first


def test_the_memory_of_checkpoints_on_the_host_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result = planned()
    # All weights, and a quarter of the moments: each of the four learners writes its own
    assert result["host_bytes"] == sum(line["bytes"] for line in result["host_lines"])
    assert result["host_bytes"] == pytest.approx(6 * result["job"]["drafter_parameters"], abs=2048)
    show_plan(result)
    said = capsys.readouterr().out
    assert f"On the host, in the first process, {result['host_bytes'] / 2**30:.1f} GiB:" in said
    assert "checkpoint: copy of 'optimizer: both moments', page-locked, 3.2 GiB = 2 x P / 4 432,553,280 x 4 B" in said


@pytest.mark.parametrize("anchors", [256, 64])
def test_uncompiled_fewer_anchors_fit(anchors: int) -> None:
    result = planned(placement="pairs", suppose=["unfused-attention"], settings=[
        f"target.path={BORN_FROM.with_suffix('')}", f"layout.anchors={anchors}"])
    assert [plan["changes"] for plan in every(result) if plan["fits"]] == [TWO, {}]


def test_uncompiled_the_plan_finds_the_anchors_that_fit_by_itself() -> None:
    best = planned(placement="pairs", suppose=["unfused-attention"])
    assert best["fits"]
    assert best["changes"] == {**TWO, "layout.anchors": 256}


def test_compiled_two_pairs_fit_and_the_headroom_is_said() -> None:
    pairs = next(plan for plan in every(planned(placement="pairs")) if plan["placement"].startswith("2 pairs"))
    assert pairs["fits"]
    assert pairs["changes"] == TWO
    assert pairs["headroom_bytes"] == min(device["headroom_bytes"] for device in pairs["devices"])
    assert pairs["headroom_bytes"] > 40 * 2**30
    assert f"fits with {pairs['headroom_bytes'] / 2**30:.1f} GiB to spare" in pairs["verdict"]


def test_the_plan_knows_better_than_two_pairs_and_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    best = planned()
    pairs = next(plan for plan in every(best) if plan["placement"].startswith("2 pairs"))
    assert best["placement"].startswith("4 x target and drafter on one card")
    assert best["supervised_tokens_per_s"] > 1.5 * pairs["supervised_tokens_per_s"]
    assert best["tokens_per_s"] == pytest.approx(4 * 8192 / best["step_ms"] * 1e3)
    show_plan(best)
    shown = capsys.readouterr().out
    assert f"{best['supervised_tokens_per_s']:,.0f} supervised tokens/s ({best['tokens_per_s']:,.0f} row tokens/s)" in shown


def test_plans_come_best_first() -> None:
    plans = every(planned())
    names, rates = [p["placement"] for p in plans], [p["supervised_tokens_per_s"] for p in plans if p["fits"]]
    assert len(names) == len(set(names))
    assert rates == sorted(rates, reverse=True)


def test_every_line_is_there_and_they_add_up() -> None:
    device = planned()["devices"][0]
    outside = sum(line["bytes"] for line in device["lines"] if not line["inside"])
    assert len(device["lines"]) > 40
    assert device["device_used_bytes"] == device["peak_bytes"] + outside
    assert sum(device["groups_at_peak"].values()) == device["device_used_bytes"]


def test_stages_add_up_to_the_step() -> None:
    for plan in every(planned()):
        assert plan["step_ms"] == pytest.approx(sum(plan["stages_ms"].values()))
        assert plan["bottleneck"] in plan["stages_ms"]


def test_the_nearest_setting_that_fits_is_named(born_from: Job) -> None:  # noqa: F811
    unfused = replace(born_from, road="unfused")
    nearest = nearest_that_fits(unfused, 130 * 2**30, fp8=True, ledger_of=colocated)
    assert nearest is not None
    changes, ledger = nearest
    assert changes == {"layout.anchors": 256}
    assert ledger.device_used_bytes <= 130 * 2**30
    card = replace(CATALOGUE["rtx-pro-6000"], usable_bytes=130 * 2**30)
    assert not make_plans(unfused, [card], placements=("colocated",), vary=False)[0].fits
    small, large = (CATALOGUE[name].usable_bytes for name in ("rtx-4090", "h200"))
    assert nearest_that_fits(born_from, small, fp8=True, ledger_of=colocated) is None
    assert nearest_that_fits(born_from, large, fp8=True, ledger_of=colocated) == ({}, colocated(born_from))


@pytest.mark.parametrize(("card", "gib", "changes"), [
    ("h200", 80, {}), ("h200", 70, {"optimizer.state": "8bit"}), ("h200", 60, {"features.precision": "fp8"}),
    ("h200", 50, {"optimizer.state": "8bit", "features.precision": "fp8"}), ("h200", 40, None), ("a100-80gb", 60, None),
])
def test_on_less_memory_come_settings_that_round_more_coarsely(
    born_from: Job, card: str, gib: int, changes: Any  # noqa: F811
) -> None:
    """On one card of so much memory; never FP8 on one without it."""
    made = make_plans(born_from, [replace(CATALOGUE[card], usable_bytes=gib * 2**30)], placements=PLACEMENTS, vary=True)
    assert {plan.gpus for plan in made} == {1}, "no pair on one card"
    assert (dict(made[0].changes) if made[0].fits else None) == changes


def test_a_placement_that_takes_more_cards_is_refused(born_from: Job) -> None:  # noqa: F811
    with pytest.raises(UserError, match="--placement fan-in: takes at least 3 cards, --gpus has 2"):
        make_plans(born_from, parse_gpus("2x h200"), placements=("fan-in",), vary=True)


def test_more_cards_are_never_slower_with_as_many_replicas(born_from: Job) -> None:  # noqa: F811
    one = make_plans(born_from, parse_gpus("1x h200"), placements=PLACEMENTS, vary=False)[0]
    eight = make_plans(born_from, parse_gpus("8x h200"), placements=PLACEMENTS, vary=False)[0]
    assert 4 < eight.supervised_tokens_per_s / one.supervised_tokens_per_s <= 8


def test_accumulation_pays_the_optimizer_once(born_from: Job) -> None:  # noqa: F811
    gpus = parse_gpus("4x rtx-4090")
    one, three = (make_plans(replace(born_from, accumulation=n), gpus, placements=PLACEMENTS, vary=False)[0] for n in (1, 3))
    assert three.supervised_tokens_per_s > one.supervised_tokens_per_s


def test_the_micro_batches_of_a_step_are_shared_out_over_the_learners(born_from: Job) -> None:  # noqa: F811
    def eight_learners(accumulation: int) -> Plan:
        plans = make_plans(replace(born_from, accumulation=accumulation), parse_gpus("8x h200"), placements=("colocated",),
                           vary=False)
        return next(plan for plan in plans if plan.job.replicas == 8 and not plan.job.sharded)

    too_few, one_each, two_each = (eight_learners(n) for n in (1, 8, 9))
    assert (too_few.changes, one_each.changes) == ({"train.accumulation": 8}, {})  # training refuses a learner without any
    assert too_few.step_ms == one_each.step_ms
    assert one_each.devices[0].ledger.peak_bytes == colocated(replace(born_from, replicas=8)).peak_bytes
    assert two_each.devices[0].ledger.peak_bytes > one_each.devices[0].ledger.peak_bytes  # gradients stand meanwhile
    assert two_each.tokens_per_s == pytest.approx(9 * 8192 / two_each.step_ms * 1e3)


def test_one_row_at_a_time_keeps_the_rows_of_a_step(born_from: Job) -> None:  # noqa: F811
    job = replace(born_from, rows=2, accumulation=4, replicas=2)
    settings, changed = list(slower(job))[-1]
    assert settings == {"train.rows_per_batch": 1, "train.accumulation": 8}
    assert changed.rows * changed.accumulation == job.rows * job.accumulation
    assert changed.micro_batches == 4


def test_one_row_at_a_time_is_not_suggested_beyond_what_a_run_file_takes(born_from: Job) -> None:  # noqa: F811
    assert not any("train.accumulation" in settings for settings, _ in slower(replace(born_from, rows=4, accumulation=2048)))
    assert any("train.accumulation" in settings for settings, _ in slower(replace(born_from, rows=4, accumulation=1024)))


def test_features_from_a_server_leave_the_card_to_the_drafter() -> None:
    """What a pair's learning card holds, and no target anywhere."""
    pairs = next(plan for plan in every(planned(placement="pairs")) if plan["placement"].startswith("2 pairs"))
    learner = next(device for device in pairs["devices"] if device["role"] == "learn")
    found = every(planned(settings=[f"target.path={BORN_FROM.with_suffix('')}", 'features.server="http://host:8000"']))
    assert {plan["placement"] for plan in found} == {
        "1 x drafter on one card, features from a server", "4 x drafter on one card, features from a server, ddp",
        "4 x drafter on one card, features from a server, fsdp2"}
    assert all([device["role"] for device in plan["devices"]] == ["learn"] for plan in found)
    ddp = next(plan for plan in found if plan["placement"].endswith("ddp"))
    assert ddp["devices"][0]["peak_bytes"] == learner["peak_bytes"]
    assert not any("target" in stage for stage in ddp["stages_ms"])
    assert "where the server gives features as fast" in ddp["verdict"]
    for options in ({"placement": "pairs"}, {"simulate": 8}):
        with pytest.raises(UserError, match=r"features\.server .*leave one of them out"):
            planned(settings=[f"target.path={BORN_FROM.with_suffix('')}", 'features.server="http://host:8000"'], **options)


def test_a_target_larger_than_a_card_is_spread_over_as_few_as_hold_it() -> None:
    plans = {cards: every(planned(gpus=f"{cards}x l40s", as_given=True)) for cards in (2, 3, 5)}
    spread = {cards: next((plan for plan in found if "over" in plan["placement"]), None) for cards, found in plans.items()}
    assert spread[2] is None, "a card is left for the drafter"
    one, two = spread[3], spread[5]
    assert one is not None
    assert two is not None
    assert one["placement"] == "1 target over 2 cards feeds 1 drafter card"
    assert one["fits"]
    assert one["changes"] == {"placement.capture_cards": 2, "placement.cards_per_target": 2}
    assert [device["role"] for device in one["devices"]] == ["capture, layers 0 to 30", "capture, layers 31 to 61", "learn"]
    whole = next(plan for plan in plans[3] if plan["placement"].startswith("1 pair"))
    assert not whole["fits"]
    standing = sum(device["standing_bytes"] for device in one["devices"][:2])
    assert standing == pytest.approx(whole["devices"][0]["standing_bytes"], rel=0.05)
    assert two["placement"] == "2 targets over 2 cards each feed 1 drafter card"
    assert two["step_ms"] < one["step_ms"]
    assert not any("over" in plan["placement"] for plan in every(planned(gpus="3x h200")))
    assert any("over" in plan["placement"] for plan in every(planned(gpus="3x h200", placement="spread")))


@pytest.mark.parametrize(("text", "message"), [
    ("4x rtx-pro-600", "did you mean 'rtx-pro-6000'"), ("0x h200", "must be between 1 and 1024"), ("", "must read like"),
    ("h200, l40s", "cards of several kinds"),
])
def test_cards_that_cannot_be_planned_for(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cli.plan(BORN_FROM, gpus=text, settings=[f"target.path={BORN_FROM.with_suffix('')}"], placement=None, row_length=None,
                 suppose=None, as_given=False, explain=False)


@pytest.mark.parametrize(("options", "message"), [
    ({"placement": "ring"}, "--placement ring: must be one of colocated, pairs, fan-in, spread"),
    ({"suppose": ["bad luck"]}, "--suppose bad luck: must be one of"), ({"row_length": 0}, "--row-length 0: must be at least 1"),
])
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(**options)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_card_of_the_catalogue_is_found_by_name(name: str) -> None:
    (gpu,) = parse_gpus(name)
    assert gpu.bf16 > 1e14
    assert gpu.usable_bytes > 2**34


def printed_without_torch(*arguments: str) -> str:
    """What the command prints, from the repository's root. Torch and transformers, seconds of imports, must not be loaded; a
    clock alone would tell of the company."""
    asked = (f"import sys; sys.argv = ['outrider', *{list(arguments)}]\n"
             "from outrider.command import main; import outrider.cli, atexit\n"
             "atexit.register(lambda: print('loaded', *sorted({'torch', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules))))"
             "\nmain()")
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, cwd=BORN_FROM.parents[1],
                          env=dict(os.environ))
    *said, loaded = done.stdout.splitlines()
    assert loaded == "loaded"
    return "\n".join(said)


def test_help_and_a_log_alone_load_no_torch() -> None:
    assert "Commands" in printed_without_torch("--help")
    log = "tests/planner/logs/attention-backward-dense.log"
    assert json.loads(printed_without_torch("doctor", "--log", log, "--json"))["cause"] == "unfused attention"


def test_the_command_needs_no_gpu_and_loads_no_torch() -> None:
    """As the example says: 3.1 s on an idle machine with torch, a third of it without."""
    answer = printed_without_torch("plan", "examples/born-from.toml", "--gpus", CARDS, "--json").splitlines()[-1]
    result = json.loads(answer)
    assert result["fits"]
    assert result["gpus"] == {"count": 4, "name": "rtx-pro-6000", "usable_bytes": CATALOGUE["rtx-pro-6000"].usable_bytes}
    assert {"placement", "supervised_tokens_per_s", "devices", "alternatives"} <= result.keys()
    assert {"name", "bytes", "phase"} <= result["devices"][0]["lines"][0].keys()
