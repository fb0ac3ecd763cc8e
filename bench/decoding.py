"""What is a drafter worth on public prompt sets: accepted length by kind, speed against the target alone, by batch and tree?

    python bench/decoding.py --target runs/small/target --drafter runs/small/drafter --device cuda --execution compiled \\
        --race "t=0 batch=1 seconds=60 ways=chain,tree16,lookup" --race "t=1 batch=8 seconds=20 ways=chain" --out decoding.jsonl

A race: every way decodes the same prompts in turns, batch by batch, in one process, the sets' prompts in turns, until the time
is over or the sets are. The target alone always runs too, by the same machinery. Ways: chain, treeN (N nodes), eager (the chain,
neither captured nor compiled), lookup (transformers' n-gram lookup), zlab (dflash_generate of z-lab's package).
One line a way as each race ends; --out keeps each as a line of JSON. --compile-only fills the compiler's caches and ends.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.data.questions import Questions, read_questions
from outrider.data.sets import SETS
from outrider.features.target import Target, load_target, load_tokenizer
from outrider.model.drafter import Drafter
from outrider.records import AcceptReport
from outrider.verify.decode import DRAFT, PROMPT, TARGET, Cycle, Decoded, Decoder
from outrider.verify.execution import EAGER
from outrider.verify.lookup import LookupDecoder
from outrider.verify.sampling import DecodeOptions
from outrider.verify.score import count_acceptance, first_difference
from outrider.verify.stops import StopStrings
from outrider.weights.opening import open_drafter

ALONE, WARM_UP_CYCLES = "alone", 8


@dataclass(frozen=True)
class Race:
    """`seconds`: no batch begins later than this after the first."""

    temperature: float
    batch: int
    seconds: float
    ways: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> "Race":
        given = dict(part.split("=") for part in text.split())
        return cls(float(given["t"]), int(given["batch"]), float(given["seconds"]), (ALONE, *given["ways"].split(",")))


@dataclass(frozen=True)
class Ground:
    """What all races share. `places`: (set, index in it) of each prompt, the sets in turn."""

    target: Target
    drafter: Drafter
    folder: Path
    questions: dict[str, Questions]
    places: list[tuple[str, int]]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    execution: str

    def prompt(self, place: tuple[str, int]) -> list[int]:
        return self.questions[place[0]].prompts[place[1]]


class Contestant:
    """One way to decode: its texts, the wall seconds of each batch and those of them that went by reading prompts."""

    def __init__(self, ground: Ground, race: Race, way: str) -> None:
        budget = int(way.removeprefix("tree")) if way.startswith("tree") else 0
        options = DecodeOptions(ground.max_new_tokens, ground.stop_ids, race.temperature, 1.0, 0, 0, budget)
        self.way, self.texts, self.seconds = way, list[Decoded](), list[float]()
        self.decoder: Any
        if way == "lookup":
            self.decoder = LookupDecoder(ground.target, options)
        elif way == "zlab":
            self.decoder = ZlabDecoder(ground, options)
        else:
            self.decoder = Decoder(
                ground.target,
                None if way == ALONE else ground.drafter,
                options,
                rows=race.batch,
                longest=max(len(ground.prompt(place)) for place in ground.places),
                execution=EAGER if way == "eager" else ground.execution,
            )

    def warm_up(self, prompts: list[list[int]]) -> None:
        """A few cycles that count for nothing."""
        if isinstance(self.decoder, Decoder):
            cycles = self.decoder.cycles(prompts, seeds=range(len(prompts)), stops=None)
            for _ in zip(range(WARM_UP_CYCLES), cycles, strict=False):
                pass
            self.decoder.clock.marks.clear()
        else:
            self.decoder.decode(prompts, seeds=[0], stops=None)

    def run(self, prompts: list[list[int]], first_seed: int) -> None:
        began = time.perf_counter()
        self.texts += self.decoder.decode(prompts, seeds=range(first_seed, first_seed + len(prompts)), stops=None)
        self.seconds.append(time.perf_counter() - began)

    def prompt_seconds(self) -> list[float] | None:
        """Of each batch run so far, or None where the prompt's share is not known."""
        if isinstance(self.decoder, Decoder):
            return self.decoder.clock.seconds(PROMPT)
        return self.decoder.prompt_seconds[-len(self.seconds) :] if isinstance(self.decoder, ZlabDecoder) else None

    def stage_ms(self, stage: str) -> float | None:
        seconds = self.decoder.clock.seconds(stage) if isinstance(self.decoder, Decoder) else []
        return 1000 * statistics.fmean(seconds) if seconds else None


class ZlabDecoder:
    """`dflash_generate` of z-lab's package, one prompt at a time, greedily."""

    def __init__(self, ground: Ground, options: DecodeOptions) -> None:
        from dflash import model as peer

        self.peer, self.target, self.options = peer, ground.target, options
        self.block_size = ground.drafter.shape.block_size
        self.prompt_seconds: list[float] = []
        loaded = peer.DFlashDraftModel.from_pretrained(ground.folder, dtype=ground.target.dtype)
        self.model = loaded.to(ground.target.device).eval()
        if ground.target.device.type != "cuda":
            peer._cuda_time = time.perf_counter  # its clock knows CUDA only

    def decode(self, prompts: Sequence[Sequence[int]], *, seeds: Sequence[int], stops: StopStrings | None) -> list[Decoded]:
        (prompt,) = prompts
        began = time.perf_counter()
        found = self.peer.dflash_generate(
            self.model,
            self.target.model,
            torch.tensor([list(prompt)], device=self.target.device),
            self.options.max_new_tokens,
            list(self.options.stop_ids),
            return_stats=True,
        )
        tokens = found.output_ids[0, len(prompt) :].tolist()
        self.prompt_seconds.append(found.time_to_first_token)
        cycles, at = [Cycle((), tokens[0], 0)], 1
        for length in found.acceptance_lengths:
            given = tuple(tokens[at : at + length])
            cycles.append(Cycle(given[:-1], given[-1], self.block_size - 1))
            at += length
        return [Decoded(tokens, tuple(cycles), time.perf_counter() - began)]


def run(ground: Ground, race: Race) -> list[dict[str, Any]]:
    """A row a way."""
    contestants = [Contestant(ground, race, way) for way in race.ways]
    prompts = [ground.prompt(place) for place in ground.places]
    for one in contestants:
        one.warm_up(prompts[: race.batch])
    began, run_to = time.monotonic(), 0
    while run_to < len(prompts) and time.monotonic() - began < race.seconds:
        batch = prompts[run_to : run_to + race.batch]
        for one in contestants if run_to // race.batch % 2 == 0 else contestants[::-1]:
            one.run(batch, run_to)
        run_to += len(batch)
    return [_row(ground, race, one, contestants[0], run_to) for one in contestants]


def _row(ground: Ground, race: Race, one: Contestant, alone: Contestant, count: int) -> dict[str, Any]:
    places = ground.places[:count]
    K = ground.drafter.shape.block_size
    kinds = [f"{name} {(ground.questions[name].kinds or ['all'] * (i + 1))[i]}" for name, i in places]
    report, by_set = count_acceptance(one.texts, K), _reports([name for name, _ in places], one.texts, K)
    forwards_known = one.way not in (ALONE, "lookup")
    prompts = [ground.prompt(place) for place in places]
    differs = [a.tokens != b.tokens for a, b in zip(one.texts, alone.texts, strict=True)]
    return {
        "way": one.way,
        "temperature": race.temperature,
        "batch": race.batch,
        "prompts": count,
        "prompts_by_set": {name: sum(set_ == name for set_, _ in places) for name in ground.questions},
        "tau": report.tau if forwards_known else one.decoder.tau if one.way == "lookup" else 1.0,
        "tokens": sum(len(text.tokens) for text in one.texts),
        "forwards": report.forwards,
        "acceptance_by_slot": report.acceptance_by_slot,
        "survival_by_slot": report.survival_by_slot,
        "tau_by_set": {name: r.tau for name, r in by_set.items()} if forwards_known else None,
        "survival_by_set": {name: r.survival_by_slot for name, r in by_set.items()} if forwards_known else None,
        "tau_by_kind": {name: r.tau for name, r in _reports(kinds, one.texts, K).items()} if forwards_known else None,
        "seconds": sum(one.seconds),
        **_speeds(one, alone, race.batch),
        "draft_ms": one.stage_ms(DRAFT),
        "target_ms": one.stage_ms(TARGET),
        "right": _right(ground, places, one.texts),
        "texts_that_differ": sum(differs) if race.temperature == 0 else None,
        "first_difference": first_difference(ground.target, prompts, one.texts, alone.texts) if race.temperature == 0 else None,
        "execution": getattr(one.decoder, "execution", "its own"),
        "max_new_tokens": ground.max_new_tokens,
        "dtype": str(ground.target.dtype),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if ground.target.device.type == "cuda" else "cpu",
    }


def _speeds(one: Contestant, alone: Contestant, size: int) -> dict[str, Any]:
    """Tokens a second with and without the reading of prompts, and over the target alone: in all, and the spread over batches."""
    found: dict[str, Any] = {"tokens_per_s": _rate(one), "speedup": _rate(one) / _rate(alone)}
    ratios = [a / b for a, b in zip(_batch_rates(one, size), _batch_rates(alone, size), strict=True)]
    found["speedup_of_batches"] = [min(ratios), statistics.median(ratios), max(ratios)]
    if one.prompt_seconds() is not None:
        found["ms_a_token_after_prompts"] = _after_prompts(one, size)
        ours, theirs = (sum(ms) / len(ms) for ms in (found["ms_a_token_after_prompts"], _after_prompts(alone, size)))
        found["speedup_after_prompts"] = theirs / ours
    return found


def _rate(one: Contestant) -> float:
    return sum(len(text.tokens) for text in one.texts) / sum(one.seconds)


def _batch_rates(one: Contestant, size: int) -> list[float]:
    return [sum(len(text.tokens) for text in one.texts[i * size : (i + 1) * size]) / wall for i, wall in enumerate(one.seconds)]


def _after_prompts(one: Contestant, size: int) -> list[float]:
    """Milliseconds a token of each batch, the first token of each text and the reading of prompts left out."""
    return [
        1000 * (wall - reading) / max(1, sum(len(text.tokens) - 1 for text in one.texts[i * size : (i + 1) * size]))
        for i, (wall, reading) in enumerate(zip(one.seconds, one.prompt_seconds() or [], strict=True))
    ]


def _reports(names: list[str], texts: list[Decoded], K: int) -> dict[str, AcceptReport]:
    return {
        name: count_acceptance([text for text, its in zip(texts, names, strict=True) if its == name], K)
        for name in dict.fromkeys(names)
    }


def _right(ground: Ground, places: list[tuple[str, int]], texts: list[Decoded]) -> float | None:
    """The share of right answers where a set has answers."""
    marks = [
        mark
        for (name, i), text in zip(places, texts, strict=True)
        if (mark := ground.questions[name].grade(i, text.tokens)) is not None
    ]
    return statistics.fmean(marks) if marks else None


def _print(row: dict[str, Any]) -> None:
    stages = " / ".join("-" if row[key] is None else f"{row[key]:.2f}" for key in ("draft_ms", "target_ms"))
    sets = ", ".join(f"{name} {tau:.3f}" for name, tau in (row["tau_by_set"] or {}).items())
    after = f"{row['speedup_after_prompts']:.3f}" if "speedup_after_prompts" in row else "-"
    print(
        f"T={row['temperature']:g} batch {row['batch']:2} {row['way']:7} n={row['prompts']:3} tau {row['tau']:.3f} ({sets}) "
        f"{row['tokens_per_s']:8.1f} tokens/s {row['speedup']:.3f} x ({after} x after prompts), "
        f"draft / target {stages} ms, differ {row['texts_that_differ']} {(row['first_difference'] or {}).get('kind', '')}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--race", type=Race.read, action="append", required=True)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--limit", type=int, default=None, help="only the first so many prompts of a set")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--execution", default=EAGER, help="eager, graph or compiled")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.target)
    target = load_target(given.target, dtype=given.dtype, device=given.device, last_layer=None, head=True)
    questions = {name: read_questions(None, name, tokenizer, limit=given.limit, thinking=None) for name in given.sets.split(",")}
    longest = max(len(asked.prompts) for asked in questions.values())
    order = random.Random(0).sample(range(longest), longest)  # sets are sorted by kind, and the time may end before they do
    places = [(name, i) for i in order for name, asked in questions.items() if i < len(asked.prompts)]
    drafter = open_drafter(given.drafter, dtype=given.dtype, device=given.device)
    stop_ids = tuple(target.stop_ids(tokenizer))
    ground = Ground(target, drafter, given.drafter, questions, places, given.max_new_tokens, stop_ids, given.execution)
    for race in given.race:
        began = time.monotonic()
        if given.compile_only:
            for way in race.ways:
                Contestant(ground, race, way)
            print(f"{race}: compiled in {time.monotonic() - began:.1f} s", flush=True)
            continue
        for row in run(ground, race):
            _print(row)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
