"""The doctor of a machine: each finding from what it reads, and what it means for a run."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_ledger import BORN_FROM, born_from  # noqa: F401 - the fixture

from outrider import cli
from outrider.errors import UserError
from outrider.features import guards
from outrider.planner.doctor import machine, readings
from outrider.planner.doctor.machine import (
    Asked,
    cache_finding,
    card_finding,
    disk_finding,
    driver_finding,
    fits,
    look_at,
    rows_finding,
    target_finding,
    version_findings,
)
from outrider.planner.doctor.record import CardProcess
from outrider.planner.job import Job
from outrider.planner.ledger import colocated
from outrider.show import show_doctor

GIB = 2**30
HERE = [f"target.path={BORN_FROM.with_suffix('')}"]


@pytest.fixture
def asked(born_from: Job, tmp_path: Path) -> Asked:  # noqa: F811
    return Asked(job=born_from, roles=("capture", "learn"), target=str(BORN_FROM.with_suffix("")), rows=tmp_path / "rows",
                 heldout=None, folder=tmp_path / "not" / "there", disk_bytes=GIB, kernel_cache=tmp_path, cuda=True, fused=True,
                 linear=True)


@pytest.mark.parametrize(("driver", "cuda", "ok", "word"), [
    ("580.82.07", "13.0", True, "enough"), ("570.133.20", "13.0", False, "needs 580.65 or newer"),
    ("525.60.13", "12.8", True, "enough"), ("470.57.02", "12.8", False, "too old"),
    (None, "13.0", None, "does not answer"), ("580.82.07", None, None, "no CUDA"),
    ("999.1", "99.0", True, ""),
])
def test_the_driver_against_torchs_cuda(driver: str | None, cuda: str | None, ok: bool | None, word: str) -> None:
    found = driver_finding(driver, cuda)
    assert found.ok is ok
    assert word in found.message


def test_versions_are_held_against_each_other() -> None:
    here: dict[str, str | None] = {"python": "3.12.1", "cuda": "13.0", "torch": "2.11.0+cu130", "triton": "3.5.0",
                                   "transformers": "5.17.0", "flash-linear-attention": None}
    stated = {"torch": ['triton==3.6.0; platform_system == "Linux"', 'numpy; extra == "x"'],
              "transformers": ["torch>=2.12; extra == 'torch'"], "outrider": ["torch>=2.11", "transformers>=5.18"]}
    found = {finding.name: finding for finding in version_findings(here, stated, cuda=True)}
    assert found.keys() == {"torch", "triton", "transformers", "flash-linear-attention"}
    assert found["torch"].ok  # what an extra asks for is not asked of everybody
    assert (found["triton"].ok, found["transformers"].ok) == (False, False)
    assert "torch 2.11.0+cu130 needs triton==3.6.0" in found["triton"].message
    assert found["flash-linear-attention"].ok is None
    missing = {finding.name: finding.ok for finding in version_findings({"torch": "2.11", "triton": None}, {}, cuda=True)}
    assert missing == {"torch": True, "triton": False}
    assert version_findings({"triton": None}, {}, cuda=False)[0].ok is None


def test_a_card_that_others_use_is_named_with_them() -> None:
    assert card_finding(0, 94 * GIB, int(94.5 * GIB), ()).ok
    used = card_finding(1, 20 * GIB, 94 * GIB, (CardProcess(4242, "serve", 74 * GIB),))
    assert (used.name, used.ok) == ("memory of card 1", False)
    assert "20.00 GiB of 94.00 GiB free; used by serve (process 4242, 74.00 GiB)" in used.message
    assert "does not name" in card_finding(0, 20 * GIB, 94 * GIB, ()).message


def test_a_run_that_fits_is_tight_or_is_too_large(asked: Asked) -> None:
    ledger = colocated(asked.job)
    assert fits(asked, 140 * GIB, 140 * GIB, fp8=False).ok
    tight = fits(asked, ledger.device_used_bytes - 1, 140 * GIB, fp8=False)
    assert not tight.ok
    assert "may run out" in tight.message
    unfused = replace(asked, job=replace(asked.job, road="unfused"))
    assert "--set layout.anchors=256" in fits(unfused, 160 * GIB, 160 * GIB, fp8=False).message
    assert "see outrider plan" in fits(asked, 24 * GIB, 24 * GIB, fp8=True).message


def test_the_kernel_cache_on_a_network_mount_or_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no kernels yet" in cache_finding(tmp_path / "none").message
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "group.json").write_text('{"a": 1', encoding="utf-8")
    assert cache_finding(tmp_path).message.endswith("remove them by hand")
    assert not cache_finding(tmp_path).ok
    monkeypatch.setattr(guards, "file_system_of", lambda place: "nfs4")
    assert "network mount (nfs4)" in cache_finding(tmp_path / "none").message
    assert (tmp_path / "kernel").is_dir()  # a look removes nothing


def test_the_disk_of_a_folder_that_is_not_there_yet(asked: Asked) -> None:
    assert disk_finding(asked).ok
    short = disk_finding(replace(asked, disk_bytes=2**60))
    assert not short.ok
    assert "checkpoint.keep_last" in short.message
    assert disk_finding(None).name == "disk"


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One free RTX PRO 6000, its driver, and Triton."""
    total = int(94.97 * GIB)
    card = SimpleNamespace(total_memory=total, uuid="aa")
    for name, value in {
        "device_count": lambda: 1, "is_available": lambda: True, "get_device_name": lambda i: "NVIDIA RTX PRO 6000 Blackwell",
        "get_device_properties": lambda i: card, "get_device_capability": lambda i: (12, 0),
        "mem_get_info": lambda i: (total, total),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine, "ask_driver", lambda query: ["580.82.07, NVIDIA RTX PRO 6000"])
    monkeypatch.setattr(readings, "ask_driver", lambda query: [])


def refuse() -> str:
    raise UserError("dQ of the fused kernel is wrong")


@pytest.mark.usefixtures("pretended")
def test_a_pretended_card_and_a_run_on_it(asked: Asked) -> None:
    found = {f.name: f for f in look_at(asked, self_test=lambda: "right", host_free=64 * GIB, host_needed=20 * GIB)}
    assert found["gpu"].ok
    assert "rtx-pro-6000 (94.97 GiB, compute capability 12.0)" in found["gpu"].message
    assert found["driver"].ok
    assert found["fused attention"].message == "right"
    assert found["the run's memory"].ok
    assert found["memory of card 0"].ok
    assert found["kernel cache"].ok
    bad = {f.name: f for f in look_at(asked, self_test=refuse, host_free=GIB, host_needed=20 * GIB)}
    assert (bad["fused attention"].ok, bad["host memory"].ok) == (False, False)
    assert "dQ" in bad["fused attention"].message
    dense = look_at(replace(asked, fused=False), self_test=refuse, host_free=GIB, host_needed=0)
    assert next(f for f in dense if f.name == "fused attention").ok is None


def test_a_card_that_torch_does_not_see(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(machine, "ask_driver", lambda query: ["NVIDIA H200, 143771"])
    gpu = look_at(asked, self_test=refuse, host_free=GIB, host_needed=0)[0]
    assert gpu.ok is False
    assert "the driver sees 1 card(s), torch none" in gpu.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
def test_a_machine_without_a_gpu_says_so_and_what_can_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    nothing: dict[str, Any] = {"record": None, "log": None, "run": None, "settings": None, "row_length": None}
    result = cli.doctor(**nothing)
    checks = {check["name"]: check for check in result["checks"]}
    assert checks["gpu"]["ok"]
    assert "no CUDA device here; what can be done here: respond" in checks["gpu"]["message"]
    assert checks["torch"]["message"] == torch.__version__
    assert result["ok"] == all(check["ok"] is not False for check in result["checks"])
    asking = cli.doctor(**{**nothing, "run": BORN_FROM, "settings": HERE})
    assert not asking["ok"]
    assert "and the run asks for one" in asking["checks"][0]["message"]
    json.dumps(asking)
    show_doctor(asking)
    assert "NOT sound" in capsys.readouterr().out


def test_the_run_file_is_named_once() -> None:
    with pytest.raises(UserError, match="is named as the run file too: name one"):
        cli.doctor(BORN_FROM, record=None, log=None, run=Path("other.toml"), settings=None, row_length=None)


def test_a_run_without_its_data_is_not_sound(asked: Asked, toy_rows: Path, tmp_path: Path) -> None:
    assert rows_finding(asked).ok is False
    assert "make it with outrider prepare" in rows_finding(asked).message
    there = replace(asked, rows=toy_rows)
    assert rows_finding(there).ok
    count = json.loads((toy_rows / "rows.json").read_text())["num_rows"]
    short = rows_finding(replace(there, job=replace(asked.job, accumulation=count + 1)))
    assert (short.ok, f"{count} rows, a step takes {count + 1}" in short.message) == (False, True)
    assert "there is no such file" in rows_finding(replace(there, heldout=tmp_path / "held.jsonl")).message
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.json").write_text((toy_rows / "rows.json").read_text())
    assert "rows.parquet: the prepared rows are missing" in rows_finding(asked).message


def test_a_target_without_weights_is_enough_to_plan_alone(toy_folder: Any) -> None:
    bare, whole, far = map(target_finding, (str(BORN_FROM.with_suffix("")), str(toy_folder()), "me/model"))
    assert (bare.ok, whole.ok, far.ok) == (False, True, None)
    assert "enough to plan, not to train" in bare.message
