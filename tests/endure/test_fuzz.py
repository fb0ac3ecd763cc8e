"""Mutated input ends in success or one sentence; 500 examples of each kind: bench/fuzz.py."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "fuzz.py"


def test_a_few_mutations_of_each_kind() -> None:
    done = subprocess.run([sys.executable, str(BENCH), "--examples", "10", "--no-result"], timeout=100, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert sorted(counts) == ["checkpoints", "data records", "run files", "tokenizer folders"]
    assert all(count == {"examples": 10, "failures": 0} for count in counts.values())
