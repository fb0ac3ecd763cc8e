"""A target over several cards: cuts against every other, ledgers that add up to the whole, plans and time lines that know it."""

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ledger import BORN_FROM, born_from  # noqa: F401 - the fixture

from outrider import cli
from outrider.errors import UserError
from outrider.planner.gpus import CATALOGUE
from outrider.planner.job import Job
from outrider.planner.ledger import capturer, capturers
from outrider.planner.plan import make_plans
from outrider.planner.simulate import Arrangement, StageTimes, simulate
from outrider.planner.spread import cards_each, evenly, goes_onto, spread_over, time_shares
from outrider.planner.timeline import TraceFile
from outrider.records import Span

GIB = 2**30


@settings(max_examples=80, deadline=None)
@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=9), cards=st.integers(1, 5))
def test_no_other_cuts_have_a_smaller_largest_sum(costs: list[int], cards: int) -> None:
    given = tuple(map(float, costs))
    if cards > len(costs):
        with pytest.raises(UserError, match="layers to share out"):
            evenly(given, cards)
        return

    def largest(cuts: tuple[int, ...]) -> float:
        return max(sum(given[a:b]) for a, b in pairwise((0, *cuts, len(given))))

    found = evenly(given, cards)
    assert len(found) == cards - 1
    assert all(a < b for a, b in pairwise((0, *found, len(given))))
    assert largest(found) == min(largest(cuts) for cuts in combinations(range(1, len(given)), cards - 1))


def of(job: Job, cards: int, usable: int | None = None) -> Job:
    return spread_over(replace(job, prefetch=True), cards, usable)


def test_the_shares_hold_what_the_whole_held(born_from: Job) -> None:  # noqa: F811
    whole = capturer(replace(born_from, prefetch=True))
    for cards in (2, 3, 5):
        found = capturers(of(born_from, cards))
        for name in ("target: layers", "target: embedding"):
            kept = [line.bytes for ledger in found for line in ledger.lines if line.name == name]
            assert sum(kept) == pytest.approx(sum(x.bytes for x in whole.lines if x.name == name), abs=512 * cards)
        assert [ledger.layers for ledger in found] == list(of(born_from, cards).capture_ranges)
        assert found[0].role.startswith("capture, layers 0 to ")
        assert max(ledger.peak_bytes for ledger in found) < whole.peak_bytes / cards * 1.35, "each also has rows in flight"
    assert sum(time_shares(of(born_from, 3))) == pytest.approx(1.0)
    assert max(time_shares(of(born_from, 3))) < 0.35


def test_bytes_decide_where_even_times_do_not_fit(born_from: Job) -> None:  # noqa: F811
    by_time = of(born_from, 2)
    tight = min(capturer(of(born_from, 2, 1)).device_used_bytes, capturer(by_time).device_used_bytes)
    assert capturer(by_time).device_used_bytes > tight, "the embedding stands with the first layers"
    assert of(born_from, 2, tight).cuts != by_time.cuts
    assert of(born_from, 2, 10**12).cuts == by_time.cuts
    assert goes_onto(replace(born_from, prefetch=True), 2, tight)
    assert not goes_onto(replace(born_from, prefetch=True), 2, tight - 1)


def test_a_plan_takes_as_few_cards_for_a_target_as_hold_it(born_from: Job) -> None:  # noqa: F811
    job = replace(born_from, prefetch=True)
    assert [cards_each(job, 4, gib * GIB) for gib in (96, 40, 24, 4)] == [1, 2, 4, 4]
    assert cards_each(job, 1, GIB) == 1
    card = replace(CATALOGUE["rtx-pro-6000"], usable_bytes=40 * GIB)
    spread = make_plans(born_from, [card] * 5, placements=("spread",), vary=False)[0]
    assert spread.placement == "2 targets over 2 cards each feed 1 drafter card"
    assert [(d.count, d.ledger.roles) for d in spread.devices] == [(2, ("capture",)), (2, ("capture",)), (1, ("learn",))]
    assert spread.fits
    assert spread.gpus == 5


def test_the_verb_says_what_stands_on_each_card_and_simulates_it() -> None:
    result = planned_on("3x rtx-5090", placement="spread", settings=["optimizer.state=8bit"])
    assert [device["role"].split(",")[0] for device in result["devices"]] == ["capture", "capture", "learn"]
    assert result["devices"][1]["role"].endswith("to 61")
    simulated = planned_on("3x rtx-5090", settings=["optimizer.state=8bit"], simulate=3)["simulated"]
    spread = next(one for one in simulated["arrangements"] if one["changes"].get("placement.cards_per_target") == 2)
    assert spread["fits"]
    assert spread["placement"] == "1 target over 2 cards feeds 1 drafter card"
    assert spread["step_ms"] == pytest.approx(result["step_ms"], rel=0.05), "the pace of the slower share"


def planned_on(cards: str, *, settings: list[str], **options: Any) -> dict[str, Any]:
    return cli.plan(BORN_FROM, gpus=cards, settings=[f"target.path={BORN_FROM.with_suffix('')}", *settings], **options)


def stepped(capture: float, learn: float, cards: int, shares: tuple[float, ...], **times: float) -> float:
    arrangement = Arrangement(1, cards, 4, one_at_a_time=times.pop("turns", 0.0) > 0, gpus_per_machine=8, shares=shares)
    return simulate(StageTimes(capture, 0.0, learn, 0.0, 0.0, **times), arrangement).step_ms / 4


@pytest.mark.parametrize(("expected", "found"), [
    (50, stepped(100, 10, 2, (0.5, 0.5))),  # two shares, two rows at work
    (70, stepped(100, 10, 2, (0.3, 0.7))),  # the slower share sets the pace
    (60, stepped(100, 60, 2, (0.5, 0.5))),  # or the drafter
    (25, stepped(100, 10, 4, (0.5, 0.5))),  # two targets of two
    (50, stepped(100, 10, 2, (0.5, 0.5), cross=5)),  # what crosses meanwhile costs nothing in the steady state
    (105, stepped(100, 10, 2, (0.5, 0.5), cross=5, turns=1)),  # in turn: one row at a time, all the way
])
def test_steps_of_spread_targets_that_can_be_worked_out(expected: float, found: float) -> None:
    assert found == pytest.approx(expected, rel=0.06)


def test_a_traced_capture_is_the_sum_of_its_shares() -> None:
    spans = [Span(lane, label, 100.0 * step + begin, 100.0 * step + end) for step in range(6) for lane, label, begin, end in (
        ("0 capture 0.0", "capture", 0, 30), ("0 cross 0.1", "cross", 30, 32), ("0 capture 0.1", "capture", 32, 82),
        ("0 learn", "learn", 10, 60), ("0 learn", "update", 60, 70))]
    assert TraceFile("cpu", 6, 1, 1, tuple(spans)).stages() == {"capture": 80, "cross": 2, "learn": 50, "update": 10}
