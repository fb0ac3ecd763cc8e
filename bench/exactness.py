"""Is drafted text the target's own, whatever the drafter, and does sampled text follow the target's probabilities?

    python bench/exactness.py --out bench/results/exactness.md

Random small targets of each kind (tests/toys.py) in float32 on a CPU. Greedy: 500 prompts, drafters of every quality, chains and
trees, against forwards without a cache, token for token. Sampled: the exact chances of three tokens against 600 texts, by
chi-square, for 20 seeds; and the same with draft probabilities that are wrong on purpose, which must be seen.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "verify")]
from exactness import QUALITIES, SHAPE, ask, compare  # noqa: E402
from overfit import overfit_drafter  # noqa: E402
from scripted import plain_greedy  # noqa: E402
from three_tokens import PROMPT, p_value_of, three_tokens  # noqa: E402
from toys import KINDS, save_toy  # noqa: E402

from outrider.features.target import Target, load_target  # noqa: E402
from outrider.progress import ProgressBar  # noqa: E402
from outrider.verify import cycle  # noqa: E402
from outrider.verify.decode import decode  # noqa: E402
from outrider.verify.execution import EAGER  # noqa: E402
from outrider.verify.sampling import DecodeOptions  # noqa: E402

TREE, TEXTS, WRONG_SEEDS = 9, 600, 2
SAMPLED = {
    "temperature 1.5, top-k 2": {"temperature": 1.5, "top_k": 2, "top_p": 1.0},
    "temperature 0.7, top-k 2": {"temperature": 0.7, "top_k": 2, "top_p": 1.0},
    "temperature 3, top-k 2, top-p 0.95": {"temperature": 3.0, "top_k": 2, "top_p": 0.95},
}


def greedy(targets: dict[str, Target], count: int) -> list[list[Any]]:
    rows = []
    with ProgressBar("greedy", total=4 * len(QUALITIES), unit="drafters") as bar:
        for kind, target in targets.items():
            asked = ask(target, count)
            for quality in QUALITIES:
                chain = compare(target, asked, quality, batch=50, tree_budget=0)
                tree = ("refused", "-") if kind == "qwen3_5" else compare(target, asked, quality, batch=50, tree_budget=TREE)
                rows.append([kind, quality, count, *chain, *tree])
                bar.advance(1)
    return rows


def p_values(target: Target, settings: dict[str, float], seeds: int, tree_budget: int) -> list[float]:
    """Of TEXTS texts a seed."""
    options = DecodeOptions(max_new_tokens=3, stop_ids=(), seed=0, tree_budget=tree_budget, **settings)  # type: ignore[arg-type]
    chance = three_tokens(target, options)
    (text,) = plain_greedy(target, [PROMPT], 24)
    drafter = overfit_drafter(target, SHAPE, (*PROMPT, *text), prompt=len(PROMPT), steps=40)  # right often enough to be accepted
    return [p_value_of(decode(target, drafter, [PROMPT] * TEXTS, replace(options, seed=10_000 * seed), batch_size=TEXTS,
                              execution=EAGER, stops=None).texts, chance) for seed in range(seeds)]


def sampled(targets: dict[str, Target], seeds: int) -> list[list[Any]]:
    rows = []
    judge = cycle.judge_sampled
    with ProgressBar("sampled", total=2 * len(SAMPLED) * 3, unit="settings") as bar:
        for kind in ("llama", "qwen3_5"):
            for name, settings in SAMPLED.items():
                for how in ("chain", f"tree of {TREE}", "chain, q uniform on purpose"):
                    bar.advance(1)
                    if kind == "qwen3_5" and how.startswith("tree"):
                        continue
                    with pytest.MonkeyPatch.context() as patch:
                        if "purpose" in how:
                            patch.setattr(cycle, "judge_sampled", lambda tokens, q, *rest: judge(
                                tokens, torch.full_like(q, 1 / q.shape[-1]), *rest))
                        tried = min(seeds, WRONG_SEEDS) if "purpose" in how else seeds
                        found = p_values(targets[kind], settings, tried, TREE if how.startswith("tree") else 0)
                    rows.append([kind, name, how, tried, min(found), sorted(found)[len(found) // 2], max(found)])
    return rows


def table(header: list[str], rows: list[list[Any]]) -> str:
    cells = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        targets = {kind: load_target(str(save_toy(Path(folder) / kind, kind, seed=0, dtype=torch.float32, layers=6, tie=False)),
                                     dtype="float32", device="cpu", last_layer=None, head=True) for kind in KINDS}
        greedy_rows, sampled_rows = greedy(targets, given.prompts), sampled(targets, given.seeds)
    differing = sum(cell for row in greedy_rows for cell in (row[3], row[5]) if isinstance(cell, int))
    right = min(row[4] for row in sampled_rows if "purpose" not in row[2])
    caught = max(row[6] for row in sampled_rows if "purpose" in row[2])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    text = "\n".join([
        "# Is drafted text the target's own?", "",
        f"Greedy: {differing} texts differ. Sampled: the smallest p-value of all right settings and seeds is {right:.2g}, the "
        f"largest of all wrong ones {caught:.2g}.", "",
        f"`python bench/exactness.py --prompts {given.prompts} --seeds {given.seeds}`, commit {commit}, "
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores, one thread, Python {platform.python_version()}, torch "
        f"{torch.__version__}, float32, {time.monotonic() - began:.0f} s. Random targets of 6 layers and width 32 "
        f"(tests/toys.py), drafter of 2 layers, one full and one sliding (window 6), K = {SHAPE.block_size}; prompts of 1 to 23 "
        "tokens, 24 new ones or up to a stop token, 50 side by side. `sliding` is a target of window 5 in every second layer, "
        "`qwen3_5` a hybrid.", "",
        "## Greedy", "",
        table(["target", "drafter", "texts", "differ (chain)", "tau (chain)", f"differ (tree of {TREE})", "tau (tree)"],
              greedy_rows), "",
        f"## Sampled: chi-square of {TEXTS} texts of three tokens a seed", "",
        table(["target", "settings", "how", "seeds", "least p", "median p", "greatest p"], sampled_rows), ""])
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")
    assert differing == 0, "drafted text is not the target's own"
    assert right > 1e-3 > 1e-6 > caught, "sampled text does not follow the target, or a wrong rule went unseen"


if __name__ == "__main__":
    main()
