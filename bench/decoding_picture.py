"""Draws what decoding.py measured: survival by slot, tau by set and temperature, tau by tree budget.

    python bench/decoding_picture.py decoding_gpu.jsonl decoding_mtbench.jsonl decoding.svg

Takes any number of its files, the last argument is the picture. Where rows repeat a measurement the one of most prompts is drawn.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


@dataclass(frozen=True)
class Point:
    """tau and survival of one set at one temperature and tree budget (0: the chain), over `prompts` prompts."""

    set: str
    temperature: float
    budget: int
    prompts: int
    tau: float
    survival: list[float]


def read(path: Path) -> Iterator[Point]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "conditions" in row:  # a result of `outrider evaluate`, one set each
            conditions = row["conditions"]
            yield Point(
                row["set"],
                conditions["temperature"],
                row["tree_budget"],
                conditions["prompts"],
                row["tau"],
                row["survival_by_slot"],
            )
        elif row["way"] == "chain" or row["way"].startswith("tree"):
            budget = int(row["way"].removeprefix("tree")) if row["way"] != "chain" else 0
            for name, tau in row["tau_by_set"].items():
                yield Point(name, row["temperature"], budget, row["prompts_by_set"][name], tau, row["survival_by_set"][name])


def draw(points: list[Point], out: Path) -> None:
    best = {(p.set, p.temperature, p.budget): p for p in sorted(points, key=lambda p: p.prompts)}
    sets = list(dict.fromkeys(p.set for p in points))
    temperatures = sorted({p.temperature for p in points})
    figure, (by_slot, by_set, by_budget) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for i, name in enumerate(sets):
        for temperature in temperatures:
            if point := best.get((name, temperature, 0)):
                style = "-" if temperature == 0 else "--"
                slots = range(1, len(point.survival) + 1)
                by_slot.plot(
                    slots,
                    point.survival,
                    style,
                    color=f"C{i}",
                    marker="o",
                    ms=3,
                    label=f"{name}, T={temperature:g}, n={point.prompts}",
                )
                bar = by_set.bar(
                    i + 0.4 * (temperatures.index(temperature) - 0.5),
                    point.tau - 1,
                    0.38,
                    bottom=1,
                    color=f"C{i}",
                    alpha=1 if temperature == 0 else 0.45,
                )
                by_set.bar_label(bar, [f"{point.tau:.2f}\nT={temperature:g}"], fontsize=7)
        budgets = sorted(b for s, t, b in best if s == name and t == 0)
        if len(budgets) > 1:
            by_budget.plot(
                budgets,
                [best[name, 0, b].tau for b in budgets],
                marker="o",
                ms=3,
                color=f"C{i}",
                label=f"{name}, n={', '.join(str(best[name, 0, b].prompts) for b in budgets)}",
            )
    by_slot.set(title="Chain: share of blocks accepted up to a slot", xlabel="slot", ylim=(0, None))
    highest = max(point.tau for point in best.values() if point.budget == 0)
    by_set.set(title="Chain: tau (bonus included)", xticks=range(len(sets)), ylim=(1, 1 + 1.25 * (highest - 1)))
    by_set.set_xticklabels(sets)
    by_budget.set(title="T=0: tau by tree budget (0: the chain)", xlabel="draft tokens a forward", ylim=(1, None))
    for axes in (by_slot, by_budget):
        axes.legend(fontsize=7)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    draw([point for source in given.sources for point in read(source)], given.picture)
