"""Question: does a run that is killed at random moments end as if it had never been, to the bit, and leave no bad checkpoint?

Kills (SIGKILL) a toy run on the CPU `--kills` times, each start at a moment drawn from the length of the whole run, and compares
the weights, moments and random generators of every run that ended with those of an uninterrupted one. Writes
bench/results/endure.md; the last line of stdout is JSON. Kills at every file operation of a save: tests/train/test_checkpoint.py.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "endure"), str(HERE.parent / "tests" / "train")]

import torch  # noqa: E402
from crashes import Tally, crash_series  # noqa: E402
from toys import MASK, VOCAB, save_toy, toy_tokenizer  # noqa: E402

from outrider.config import RunConfig, parse_run  # noqa: E402
from outrider.data.prepare import PrepareOptions, prepare  # noqa: E402


def make_data(folder: Path) -> None:
    """A toy target and a few rows of conversations."""
    save_toy(folder / "target", "llama", seed=0, dtype=torch.float32, layers=6, tie=False)
    chats = [{"messages": [{"role": "user", "content": f"{i}+{i}?"}, {"role": "assistant", "content": f"{i} and {i} is {2 * i}"}]}
             for i in range(13)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    options = PrepareOptions(vocab_size=VOCAB, row_length=96, supervise="all", on_bad_record="stop", max_unsupervised_share=0.0,
                             max_bad_share=1.0, stop_token_ids=(), template_options={})
    prepare([folder / "chats.jsonl"], tokenizer=toy_tokenizer(), out=folder / "rows", options=options)


def toy_run(folder: Path, name: str, *, processes: int = 1) -> RunConfig:
    """Of several processes each has its own share of a step, of the masters and of the moments."""
    return parse_run({
        "target": {"path": str(folder / "target"), "dtype": "float32"}, "data": {"rows": str(folder / "rows")},
        "drafter": {"num_layers": 2, "block_size": 4, "mask_token_id": MASK, "target_layer_ids": [1, 2, 4]},
        "layout": {"anchors": 12, "document_floor": 2}, "optimizer": {"learning_rate": 3e-3},
        "train": {"folder": str(folder / name), "steps": 24, "rows_per_batch": 2, "accumulation": processes},
        "checkpoint": {"every": 2}, "placement": {"sharding": "fsdp2" if processes > 1 else "ddp"},
    }, where="bench")


def write_result(tally: Tally, *, seconds: float, command: str) -> None:
    commit = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    steps = sorted(tally.at_step)
    lines = [
        "# Does a killed run end as if nothing had been?", "",
        f"`{command}`, {time.strftime('%Y-%m-%d')}, commit {commit.stdout.strip()}, {os.cpu_count()} CPU cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}, {seconds:.0f} s.",
        "A toy run of 24 steps, a checkpoint every 2; each start is killed (SIGKILL) at a random moment of its time.",
        "", "| | |", "|---|---|", f"| random kills | {tally.kills} |",
        f"| of them in the middle of a save (a half-written checkpoint lay there) | {tally.in_save} |",
        f"| newest checkpoint after a kill: min, median, max step | {steps[0]}, {steps[len(steps) // 2]}, {steps[-1]} |",
        f"| runs that ended | {tally.runs} |",
        f"| of them with other weights, moments or generators than the uninterrupted run | {tally.different_runs} |",
        f"| checkpoints under their own name that do not verify | {tally.damaged_checkpoints} |", "",
    ]
    (HERE / "results" / "endure.md").write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--processes", type=int, default=1, help="that share masters and moments out, and sum over gloo")
    options.add_argument("--folder", type=Path, help="where the runs go; by default a folder that is removed")
    options.add_argument("--no-result", action="store_true", help="leave bench/results alone")
    chosen = options.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        make_data(folder)
        tally = crash_series(lambda name: toy_run(folder, name, processes=chosen.processes), kills=chosen.kills,
                             seed=chosen.seed, processes=chosen.processes,
                             say=lambda line: print(line, file=sys.stderr, flush=True))
    if not chosen.no_result:
        command = f"python bench/endure.py --kills {chosen.kills} --seed {chosen.seed} --processes {chosen.processes}"
        write_result(tally, seconds=time.monotonic() - began, command=command)
    steps = sorted(tally.at_step)
    counts = {key: value for key, value in asdict(tally).items() if key != "at_step"}
    print(json.dumps({**counts, "newest_checkpoint_after_a_kill": [steps[0], steps[len(steps) // 2], steps[-1]]}))
    sys.exit(bool(tally.different_runs or tally.damaged_checkpoints))


if __name__ == "__main__":
    main()
