"""Kills at random moments: each run goes on, ends as the uninterrupted one to the bit, and never leaves a bad checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "endure.py"


@pytest.mark.parametrize(("kills", "processes"), [(6, 1), (2, 2)])
def test_a_few_random_kills(tmp_path: Path, kills: int, processes: int) -> None:
    """A process of its own: forks of one that has threads, as pytest's may, are not safe. 200 kills: bench/endure.py."""
    done = subprocess.run([sys.executable, str(BENCH), "--kills", str(kills), "--processes", str(processes), "--folder",
                           str(tmp_path), "--no-result"], timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f'"kills": {kills}' in done.stdout
    assert '"different_runs": 0, "damaged_checkpoints": 0' in done.stdout
