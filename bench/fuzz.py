"""Question: does mutated input ever reach the user as a traceback, hang for 10 s, or cost a finished run a byte?

Mutates (hypothesis) run files, data records, checkpoints and exported drafters, and the JSON files of a target's folder,
`--examples` of each, and calls the verbs on them in this process. A failure is a traceback, an exit code other than 0 and 2,
more than 10 s, or a changed file of the run beside it. Writes bench/results/fuzz.md; the last line of stdout is JSON.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "tests" / "endure")]

import torch  # noqa: E402
from endure import make_data  # noqa: E402
from fuzzing import KINDS, Found, prepare_folder  # noqa: E402


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--examples", type=int, default=500, help="of each kind")
    options.add_argument("--kinds", default=",".join(KINDS))
    options.add_argument("--no-result", action="store_true", help="leave bench/results alone")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Found] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        make_data(folder)
        prepare_folder(folder)
        for kind in chosen.kinds.split(","):
            began, results[kind] = time.monotonic(), Found()
            KINDS[kind](folder, results[kind], chosen.examples)
            seconds[kind] = time.monotonic() - began
            print(f"{kind}: {dict(results[kind].codes)}, {len(results[kind].failures)} failures, {seconds[kind]:.0f} s",
                  file=sys.stderr, flush=True)
    for kind, found in results.items():
        for failure in found.failures[:20]:
            print(f"--- {kind}: {failure}", file=sys.stderr)
    if not chosen.no_result:
        lines = [
            "# Does mutated input ever reach the user as a traceback, hang, or cost a run a byte?", "",
            f"`python bench/fuzz.py --examples {chosen.examples}`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores, "
            f"Python {platform.python_version()}, torch {torch.__version__}.",
            "Exit 0: the mutation left something valid; exit 2: one sentence. Failures: a traceback, another code, over 10 s, "
            "a changed run.", "", "| input | examples | exit 0 | exit 2 | failures | s |", "|---|---|---|---|---|---|",
            *(f"| {kind} | {found.codes.total()} | {found.codes[0]} | {found.codes[2]} | {len(found.failures)} | "
              f"{seconds[kind]:.0f} |" for kind, found in results.items()),
        ]
        (HERE / "results" / "fuzz.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(json.dumps({kind: {"examples": found.codes.total(), "failures": len(found.failures)}
                      for kind, found in results.items()}))
    sys.exit(any(found.failures for found in results.values()))


if __name__ == "__main__":
    main()
