"""Stages: reused when nothing changed, run again when anything did, gone on with when interrupted."""

from pathlib import Path
from typing import Any

import pytest

from outrider.demo import stages as stages_module
from outrider.demo.prompts import KINDS, make_prompts
from outrider.demo.stages import Stages


class Work:
    """One stage that copies its input, and counts how often it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs, self.options = folder, 0, {"limit": 1}
        self.source, self.out = folder / "in.txt", folder / "out.txt"
        self.source.write_text("a", encoding="utf-8")

    def __call__(self) -> dict[str, Any]:
        self.runs += 1
        self.out.write_text(self.source.read_text(encoding="utf-8"), encoding="utf-8")
        return {"text": self.out.read_text(encoding="utf-8")}

    def run(self) -> dict[str, Any]:
        return Stages(self.folder, count=1).run("copy", self, options=self.options, rooms=["demo"], inputs=[self.source],
                                                outputs=[self.out])


def test_reused_when_nothing_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Work(tmp_path)
    assert work.run() == work.run() == {"text": "a"}
    assert work.runs == 1
    assert "reused" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["input", "option", "output changed", "output gone", "source"])
def test_run_again_when_anything_changed(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(tmp_path)
    work.run()
    if change == "input":
        work.source.write_text("b", encoding="utf-8")
    elif change == "option":
        work.options = {"limit": 2}
    elif change == "output changed":
        work.out.write_text("meddled", encoding="utf-8")
    elif change == "output gone":
        work.out.unlink()
    else:
        monkeypatch.setattr(stages_module, "source_digest", lambda rooms: "other code")
    work.run()
    assert work.runs == 2


def test_an_interrupted_stage_keeps_what_it_left_and_a_changed_one_does_not(tmp_path: Path) -> None:
    found = []

    class Interrupted(Work):
        def __call__(self) -> dict[str, Any]:
            found.append(self.out.exists())
            if self.runs == 0:
                super().__call__()
                raise KeyboardInterrupt
            return super().__call__()

    work = Interrupted(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        work.run()
    work.run()
    work.options = {"limit": 2}
    work.run()
    assert found == [False, True, False]


def test_prompts_are_seeded_different_and_apart() -> None:
    heldout = make_prompts(24, seed=1, exclude=set())
    texts = {p["prompt"] for p in heldout}
    train = make_prompts(360, seed=2, exclude=texts)
    assert heldout == make_prompts(24, seed=1, exclude=set())
    assert len({p["prompt"] for p in train}) == 360
    assert not texts & {p["prompt"] for p in train}
    assert {kind: sum(p["kind"] == kind for p in train) for kind in KINDS} == dict.fromkeys(KINDS, 90)
