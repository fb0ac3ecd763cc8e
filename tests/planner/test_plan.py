"""Placements: what fits, in which order, what to change; and the verb that prints them."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from test_ledger import BORN_FROM, born_from  # noqa: F401 - the fixture

from outrider import cli
from outrider.errors import UserError
from outrider.planner.gpus import CATALOGUE, parse_gpus, with_memory
from outrider.planner.job import Job
from outrider.planner.plan import PLACEMENTS, make_plans, nearest_that_fits
from outrider.show import show_plan

CARDS = "4x rtx-pro-6000"


def planned(**options: Any) -> dict[str, Any]:
    return cli.plan(BORN_FROM, gpus=CARDS, **{
        "settings": [f"target.path={BORN_FROM.with_suffix('')}"], "placement": None, "row_length": None, "suppose": None,
        "as_given": False, "explain": False, **options})


def test_the_born_from_case_says_why_it_ran_out_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    result = planned(placement="pairs", suppose=["unfused-attention"], as_given=True)
    assert not any(plan["fits"] for plan in result["plans"])
    show_plan(result)
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "attention: score matrices" in shown
    assert "Q 8,192 x N 16,384" in shown


@pytest.mark.parametrize("anchors", [256, 64])
def test_fewer_anchors_fit_without_fusion(anchors: int) -> None:
    result = planned(placement="pairs", suppose=["unfused-attention"], settings=[
        f"target.path={BORN_FROM.with_suffix('')}", f"layout.anchors={anchors}"])
    assert all(plan["fits"] for plan in result["plans"])


def test_fused_it_fits_and_the_plan_knows_better_than_pairs() -> None:
    result = planned()
    best, names = result["plans"][0], [plan["placement"] for plan in result["plans"]]
    pairs = next(plan for plan in result["plans"] if plan["placement"].startswith("2 pairs"))
    assert pairs["fits"]
    assert pairs["headroom_bytes"] > 2**30
    assert best["labels_per_s"] > 1.2 * pairs["labels_per_s"]
    assert len(names) == len(set(names))
    rates = [plan["labels_per_s"] for plan in result["plans"] if plan["fits"]]
    assert rates == sorted(rates, reverse=True)


def test_explain_holds_every_line_and_they_add_up() -> None:
    device = planned(explain=True)["plans"][0]["devices"][0]
    outside = sum(line["bytes"] for line in device["lines"] if not line["inside"])
    assert len(device["lines"]) > 40
    assert device["device_used_bytes"] == device["peak_bytes"] + outside
    assert sum(device["groups_at_peak"].values()) == device["device_used_bytes"]


def test_stages_add_up_to_the_step() -> None:
    for plan in planned()["plans"]:
        assert plan["step_ms"] == pytest.approx(sum(plan["stages_ms"].values()))
        assert plan["bottleneck"] in plan["stages_ms"]


def test_the_nearest_setting_that_fits_is_named(born_from: Job) -> None:  # noqa: F811
    card, unfused = with_memory([CATALOGUE["rtx-pro-6000"]], 160 * 2**30)[0], replace(born_from, road="unfused")
    nearest = nearest_that_fits(unfused, card)
    assert nearest is not None
    assert nearest.changes == {"layout.anchors": 256}
    assert nearest.fits
    assert not make_plans(unfused, [card], placements=("colocated",), vary=False)[0].fits
    assert nearest_that_fits(born_from, CATALOGUE["rtx-4090"]) is None


def test_more_cards_are_never_slower_with_as_many_replicas(born_from: Job) -> None:  # noqa: F811
    one = make_plans(born_from, parse_gpus("1x h200"), placements=PLACEMENTS, vary=False)[0]
    eight = make_plans(born_from, parse_gpus("8x h200"), placements=PLACEMENTS, vary=False)[0]
    assert 4 < eight.labels_per_s / one.labels_per_s <= 8


def test_accumulation_pays_the_optimizer_once(born_from: Job) -> None:  # noqa: F811
    gpus = parse_gpus("4x rtx-4090")
    one, three = (make_plans(replace(born_from, accumulation=n), gpus, placements=PLACEMENTS, vary=False)[0] for n in (1, 3))
    assert three.labels_per_s > one.labels_per_s


@pytest.mark.parametrize(("text", "message"), [
    ("4x rtx-pro-600", "did you mean 'rtx-pro-6000'"), ("0x h200", "must be between 1 and 1024"), ("", "must read like"),
    ("h200, l40s", "cards of several kinds"),
])
def test_cards_that_cannot_be_planned_for(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cli.plan(BORN_FROM, gpus=text, settings=[f"target.path={BORN_FROM.with_suffix('')}"], placement=None, row_length=None,
                 suppose=None, as_given=False, explain=False)


@pytest.mark.parametrize(("options", "message"), [
    ({"placement": "ring"}, "--placement ring: must be one of colocated, pairs, fan-in"),
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


def test_the_command_is_quick_and_needs_no_gpu() -> None:
    """From the repository's root, as the example says. 5 s on an idle machine; the test allows for company."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "outrider.cli", "plan", "examples/born-from.toml", "--gpus", CARDS, "--json"],
        capture_output=True, text=True, check=True, cwd=BORN_FROM.parents[1], env=dict(os.environ))
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["plans"][0]["fits"]
    assert time.monotonic() - began < 30
    assert result["gpus"] == {"count": 4, "name": "rtx-pro-6000", "usable_bytes": CATALOGUE["rtx-pro-6000"].usable_bytes}
