"""How many hostile prompts, options, drafters, folders and servers end in one sentence or in the target's own text?

    python bench/hostile.py --out bench/results/hostile.md

Runs the tests of hostile cases and lists every case with its outcome. Refused: `UserError`, one sentence, exit code 2, nothing
written. Answered: the same text as the target alone. The last line of stdout is JSON; the exit code is 1 when a case fails.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1] / "tests"
REFUSED, ANSWERED = "refused", "answered"
GROUPS = {  # test: (what is tried, what must come of it)
    "verify/test_hostile.py::test_what_cannot_be_continued_is_one_sentence": ("prompts, 4 kinds of targets", REFUSED),
    "verify/test_hostile.py::test_an_edge_gives_the_targets_own_text": ("edges of prompts and limits, 4 kinds of targets",
                                                                        ANSWERED),
    "verify/test_hostile.py::test_blocks_longer_than_the_answer_change_nothing": ("windows and block sizes", ANSWERED),
    "verify/test_hostile.py::test_a_weight_that_is_no_number_is_named": ("weights that are no numbers", REFUSED),
    "weights/test_foreign_folders.py::test_a_folder_that_cannot_be_used_is_one_sentence": (
        "published folders, by `evaluate` and by `train.init_from`", REFUSED),
    "weights/test_foreign_folders.py::test_a_folder_that_can_be_used_gives_the_targets_own_text": ("published folders", ANSWERED),
    "weights/test_formats.py::test_a_speculators_config_that_does_not_fit_is_refused": ("speculators folders", REFUSED),
    "train/test_initial.py::test_a_run_that_does_not_fit_is_refused": ("run files that begin from a drafter", REFUSED),
    "train/test_initial.py::test_a_target_of_the_same_sizes_is_told_apart": ("another target of the same sizes", REFUSED),
    "verify/test_engines.py::test_a_server_that_is_wrong_or_broken_is_one_sentence": ("servers", REFUSED),
    "verify/test_engines.py::test_an_address_that_is_none": ("addresses of servers", REFUSED),
    "test_cli.py::test_measurements_that_cannot_be_made": ("options of `evaluate`", REFUSED),
}


class Outcomes:
    """A plugin of pytest that keeps which cases passed."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            self.passed[report.nodeid.removeprefix("tests/")] = report.passed


def told(name: str) -> str:
    """A case's name without what the test's parameters put around it: the kind of the target, places in a list."""
    return re.sub(r"-(llama|qwen3|qwen3_5|sliding)$|^(<lambda>|words\d+)-", "", name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    began, outcomes = time.monotonic(), Outcomes()
    os.chdir(TESTS.parent)
    pytest.main(["-q", "--durations=0", "-p", "no:cacheprovider", *(f"tests/{test}" for test in GROUPS)], plugins=[outcomes])
    rows = []
    for test, (what, end) in GROUPS.items():
        cases = {name[len(test) + 1 : -1]: passed for name, passed in outcomes.passed.items() if name.startswith(f"{test}[")}
        assert cases, f"{test}: no such cases"
        failed = [name for name, passed in cases.items() if not passed]
        rows.append((what, end, cases, failed))
    total, failed_count = sum(len(row[2]) for row in rows), sum(len(row[3]) for row in rows)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    lines = [
        "# How many hostile cases end in one sentence or in the right answer?", "",
        f"{total - failed_count} of {total}. `python bench/hostile.py`, commit {commit}, {time.strftime('%Y-%m-%d')}, "
        f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, torch {torch.__version__}, float32, "
        f"{time.monotonic() - began:.0f} s. Each case once. Refused: one sentence that names the fault, exit code 2 where it was "
        "tried as a command, nothing written. Answered: the same text as the target alone.", "",
        "| what is tried | must be | cases | failed |", "|---|---|---|---|",
        *(f"| {what} | {end} | {len(cases)} | {len(failed)} |" for what, end, cases, failed in rows), "",
    ]
    for what, end, cases, failed in rows:
        names = "; ".join(dict.fromkeys(f"**{told(name)} (failed)**" if name in failed else told(name) for name in cases))
        lines += [f"**{what[0].upper()}{what[1:]}** ({end}): {names}.".replace("|", "\\|"), ""]
    text = "\n".join(lines)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")
    print(text)
    print(json.dumps({"cases": total, "failed": failed_count}))
    sys.exit(1 if failed_count else 0)


if __name__ == "__main__":
    main()
