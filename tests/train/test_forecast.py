"""Planning before training: what cannot fit is refused with a way out, what fits is rehearsed and nothing moves by it."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eight_bit import uncompiled
from test_loop import assert_same_run, metrics

from outrider.config import RunConfig, load_run
from outrider.data.rows import load_rows
from outrider.errors import UserError
from outrider.features.facts import read_facts
from outrider.files import read_json
from outrider.planner.ledger import capturer, learner
from outrider.train import rehearsal
from outrider.train.forecast import Card, Forecast, foresee
from outrider.train.loop import train
from outrider.train.placement import Devices
from outrider.train.rehearsal import worst_rows
from outrider.train.resolve import Resolved, resolve

MakeRun = Callable[..., RunConfig]
WIDE = 2**40
BORN_FROM = Path(__file__).parents[2] / "examples" / "born-from.toml"
CPU = torch.device("cpu")
ALONE, PAIR, TWO_CARDS = Devices(CPU, ()), Devices(CPU, (CPU,)), Devices(CPU, (CPU, CPU), 2)


def card(allowed: int = WIDE, *, free: int | None = None, peak: int = 2**20) -> Card:
    """A pretended one."""
    return Card("pretended card", allowed, allowed if free is None else free, False, lambda: peak)


def resolved_run(config: RunConfig) -> Resolved:
    return resolve(config, read_facts(config.target.path))


def foreseen(make_run: MakeRun, pretended: Card, **changes: Any) -> Forecast:
    forecast = foresee(resolved_run(make_run(**changes)), ALONE, lambda device: pretended, row_length=4096, replicas=1)
    assert forecast is not None
    return forecast


def test_what_cannot_fit_is_refused_with_a_setting_that_fits(make_run: MakeRun) -> None:
    wide = {"layout.anchors": 512, "train.rows_per_batch": 64}
    allowed = foreseen(make_run, card(), **wide).ledger.peak_bytes - 1
    with pytest.raises(UserError, match="the nearest that fits is --set") as refused:
        foreseen(make_run, card(allowed), **wide)
    advised = {key: int(value) for key, value in re.findall(r"--set (\S+)=(\d+)", str(refused.value))}
    assert advised
    assert foreseen(make_run, card(allowed), **wide | advised).ledger.device_used_bytes <= allowed


def test_a_refused_run_leaves_nothing_behind(make_run: MakeRun) -> None:
    config = make_run()
    with pytest.raises(UserError, match=r"the run needs .* nothing near it fits"):
        train(config, check=None, card_of=lambda device: card(2**20))
    assert not config.train.folder.exists()


@pytest.mark.parametrize(("gib", "fp8", "devices", "way_out"), [
    (52, False, ALONE, r"with the target on a card of its own it does: --set placement\.capture_cards=1$"),
    (44, True, ALONE, r"in 8 bits on a card of its own it does: --set placement\.capture_cards=1 --set features\.precision=fp8$"),
    (44, False, ALONE, r"the target spread over 2 cards of its own it does: --set placement\.capture_cards=2 --set "
                       r"placement\.cards_per_target=2$"),
    (30, True, PAIR, r"the nearest that fits is --set features\.precision=fp8 "),
    (26, False, PAIR, r"the target spread over 3 cards of its own it does: --set placement\.capture_cards=3 --set "
                      r"placement\.cards_per_target=3$"),
    (22, False, TWO_CARDS, r"the run needs .* the target spread over 3 cards of its own it does"),
    (9, False, PAIR, r"no target of its size goes onto 8 cards such as this one: serve it .* features\.server"),
    (24, True, ALONE, r"nothing near it fits: see outrider plan$"),  # where its drafter does not fit either
])
def test_a_target_too_large_goes_elsewhere(gib: int, fp8: bool, devices: Devices, way_out: str) -> None:
    """A 27B target and a 1.7 B drafter: the target on a card of its own, smaller there, or in another process."""
    resolved = resolved_run(load_run(BORN_FROM, [f"target.path={BORN_FROM.with_suffix('')}", "train.device=cuda"]))
    small = replace(card(gib * 2**30), fp8=fp8)
    with pytest.raises(UserError, match=way_out):
        foresee(resolved, devices, lambda device: small, row_length=8192, replicas=1)


def test_the_limit_is_the_allocated_peak_and_what_the_device_shows_only_warns(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = foreseen(make_run, card()).ledger
    assert "warning" not in capsys.readouterr().err
    foreseen(make_run, card(ledger.peak_bytes))  # to the byte
    assert "a close fit" in capsys.readouterr().err
    foreseen(make_run, card(free=ledger.peak_bytes))
    assert "others use it too" in capsys.readouterr().err


def test_a_target_that_the_ledger_does_not_know_is_trained_unplanned(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(*args: Any, **options: Any) -> None:
        raise UserError("latent attention, whose size the ledger does not know")

    monkeypatch.setattr("outrider.train.forecast.job_from", unknown)
    assert foresee(resolved_run(make_run()), ALONE, lambda device: card(), row_length=64, replicas=1) is None
    assert "not planned: latent attention" in capsys.readouterr().err


def test_each_card_of_a_pair_and_each_replica_has_its_own_ledger(make_run: MakeRun) -> None:
    resolved = resolved_run(make_run(**{"train.accumulation": 3, "placement.sharding": "fsdp2"}))
    pair = foresee(resolved, PAIR, lambda device: card(), row_length=4096, replicas=2)
    assert pair is not None
    assert (pair.job.prefetch, pair.job.sharded, pair.job.replicas, pair.job.micro_batches) == (True, True, 2, 2)
    assert pair.ledger == learner(pair.job)
    cards = iter([card(), card(capturer(pair.job).peak_bytes - 1)])
    with pytest.raises(UserError, match="the run needs"):
        foresee(resolved, PAIR, lambda device: next(cards), row_length=4096, replicas=2)


@pytest.mark.parametrize("changes", [
    {}, {"train.accumulation": 1, "features.keep": "memory"}, {"placement.capture_cards": 1},
], ids=["bf16", "kept features", "pair"])
def test_a_rehearsed_run_is_the_run_without_it(
    make_run: MakeRun, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    plain, rehearsed = make_run("plain", **changes), make_run("rehearsed", **changes)
    without = train(plain, check=None)
    result = train(rehearsed, check=None, card_of=lambda device: card())
    assert_same_run(plain, rehearsed)
    assert without["peak_bytes_predicted"] is None
    config = resolved_run(rehearsed)
    length = load_rows(rehearsed.data.rows).row_length
    devices = PAIR if rehearsed.placement.capture_cards else ALONE
    forecast = foresee(config, devices, lambda device: card(), row_length=length, replicas=1)
    assert forecast is not None
    assert result["peak_bytes_predicted"] == forecast.ledger.peak_bytes
    shown = capsys.readouterr().err
    kept = read_json(rehearsed.train.folder / "memory.json", what="memory")
    assert kept["predicted_bytes"] == kept["by_phase"][kept["peak_phase"]] == sum(kept["groups_at_peak"].values())
    assert re.search(r"memory: predicted \d+\.\d\d GiB at the peak, in '.+', measured 0\.00 GiB in a step of the worst", shown)


def test_a_rehearsal_with_8_bit_moments(make_run: MakeRun) -> None:
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    plain, rehearsed = (make_run(name, **{"optimizer.state": "8bit"}) for name in ("plain", "rehearsed"))
    with uncompiled():
        train(plain, check=None)
        train(rehearsed, check=None, card_of=lambda device: card())
    assert_same_run(plain, rehearsed)


def test_a_rehearsal_that_learned_would_be_seen(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is not blind."""
    monkeypatch.setattr(rehearsal, "Standstill", lambda optimizer: optimizer)
    plain, moved = make_run("plain"), make_run("moved")
    train(plain, check=None)
    train(moved, check=None, card_of=lambda device: card())
    with pytest.raises(AssertionError):
        assert_same_run(plain, moved)


def test_a_resumed_run_is_rehearsed_too_and_goes_on_exactly(make_run: MakeRun) -> None:
    whole, halves = make_run("whole"), make_run("halves")
    train(whole, check=None)
    train(halves.model_copy(update={"train": halves.train.model_copy(update={"max_hours": 1e-9})}), check=None,
          card_of=lambda device: card())
    train(halves, check=None, card_of=lambda device: card())
    assert [line["loss"] for line in metrics(whole) if "loss" in line] == [
        line["loss"] for line in metrics(halves) if "loss" in line]


def test_the_worst_rows_hold_the_longest_documents(toy_rows: Path) -> None:
    rows = load_rows(toy_rows)
    chosen = worst_rows(rows, 2)
    assert chosen is not None

    def longest(row: int) -> int:
        ids = rows.batch([row]).document_ids_BS[0]
        return int(torch.bincount(ids[ids >= 0]).max())

    best = sorted((longest(row) for row in range(len(rows))), reverse=True)[:2]
    assert [longest(int(row)) for row in chosen.row_ids_B] == best


def test_predicted_is_held_against_measured(make_run: MakeRun) -> None:
    forecast = foreseen(make_run, card())
    measured = int(forecast.ledger.peak_bytes / 1.1)
    told = replace(forecast, card=card(peak=measured)).compared()
    assert "(+10.0%)" in told
