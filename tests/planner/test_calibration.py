"""Rates of a card: measured, kept, read back, and what they change of a plan."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_plan import planned

from outrider.errors import UserError
from outrider.planner.calibration import Rates, as_gpu, measure, read_rates, steady_s, write_rates
from outrider.planner.gpus import CATALOGUE, catalogue_name, parse_gpus
from outrider.planner.speed import KEPT_UP, KEPT_UP_BANDWIDTH, KEPT_UP_FP8

CARD = CATALOGUE["rtx-pro-6000"]


def rates(**changes: Any) -> Rates:
    """As fast as the catalogue says that the card is, of which so much is kept up as of an H200."""
    assert CARD.fp8
    same = Rates("rtx-pro-6000", CARD.usable_bytes, CARD.bf16 * KEPT_UP, CARD.fp8 * KEPT_UP_FP8,
                 CARD.bandwidth * KEPT_UP_BANDWIDTH,
                 None, (8192, 5120, 34816), 30.0, "2.11")
    return replace(same, **changes)


def test_measured_on_a_cpu_at_toy_size() -> None:
    found = measure(torch.device("cpu"), (64, 32, 64), shares=0.002, memory=2**16)
    assert found.product == (64, 32, 64)
    assert min(found.bf16, found.bandwidth, found.fp8 or 0) > 0
    assert found.link is None
    assert found.seconds < 10


def test_the_first_half_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is fast while it is cool: 1 s a call in the first 10 s, 3 s from then on."""
    now = [0.0]
    monkeypatch.setattr("outrider.planner.calibration.time.perf_counter", lambda: now[0])

    def work() -> None:
        now[0] += 1.0 if now[0] < 10 else 3.0

    assert steady_s(work, seconds=30, device=torch.device("cpu")) == 3.0


def test_kept_and_read_back(tmp_path: Path) -> None:
    write_rates(tmp_path / "card.json", rates(link=4e10))
    assert read_rates(tmp_path / "card.json") == rates(link=4e10)


@pytest.mark.parametrize("changes", [
    {"bf16": None}, {"bf16": -1.0}, {"bandwidth": 0}, {"fp8": "fast"}, {"product": [1, 2]}, {"product": 3}, {"card": 5},
    {"usable_bytes": float("nan")}, {"another": 1},
])
def test_a_file_of_no_rates_is_one_sentence(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps({**asdict(rates()), **changes}))
    with pytest.raises(UserError, match=r"card.json: is not a file of measured rates \(.*make it with outrider plan --calibrate"):
        read_rates(path)


def test_a_plan_follows_the_rates_of_its_file(tmp_path: Path) -> None:
    as_stated, path = planned(), tmp_path / "card.json"
    write_rates(path, rates())
    same = planned(rates=path)
    assert same["step_ms"] == pytest.approx(as_stated["step_ms"])
    write_rates(path, rates(bf16=CARD.bf16 * KEPT_UP / 2))
    slower = planned(rates=path)
    assert slower["stages_ms"]["drafter"] == pytest.approx(2 * as_stated["stages_ms"]["drafter"])
    assert slower["stages_ms"]["optimizer"] == pytest.approx(as_stated["stages_ms"]["optimizer"])
    assert "rates measured on rtx-pro-6000 (174 TFLOP/s in bf16, " in slower["times"]
    assert slower["rates"]["seconds"] == 30.0


def test_a_card_that_no_catalogue_has_can_be_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    write_rates(path, rates(card=catalogue_name("NVIDIA A40")))
    result = planned(rates=path, gpus="2x nvidia-a40")
    assert result["gpus"]["name"] == "nvidia-a40"
    with pytest.raises(UserError, match="not a GPU in the catalogue"):
        planned(gpus="2x nvidia-a40")


def test_rates_of_another_card_are_refused(tmp_path: Path) -> None:
    write_rates(tmp_path / "card.json", rates())
    with pytest.raises(UserError, match="are of rtx-pro-6000, the cards are h200"):
        planned(rates=tmp_path / "card.json", gpus="h200")


def test_calibrating_is_refused_before_it_takes_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "card.json"
    with pytest.raises(UserError, match="measures the cards of this machine: leave --gpus out"):
        planned(calibrate=path)
    with pytest.raises(UserError, match="no CUDA device is here to measure"):
        planned(calibrate=path, gpus=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="nowhere does not exist"):
        planned(calibrate=tmp_path / "nowhere" / "card.json", gpus=None)
    assert not path.exists()


def test_a_measured_card_stands_in_for_its_own_name_alone() -> None:
    gpu = as_gpu(rates(bf16=1e14))
    mine, other = parse_gpus("rtx-pro-6000, h200", measured=gpu)
    assert mine == gpu
    assert other == CATALOGUE["h200"]
    assert gpu.link == CARD.link  # not measured: the catalogue's
