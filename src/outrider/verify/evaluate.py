"""Takes a target, a drafter and prompts, gives what the drafter is worth against the target alone; knows nothing of files."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.errors import UserError
from outrider.features.target import Target
from outrider.model.drafter import Drafter
from outrider.progress import ProgressBar
from outrider.verify.decode import DRAFT, PROMPT, TARGET, Decoded, Decoder
from outrider.verify.lookup import LookupDecoder
from outrider.verify.sampling import DecodeOptions
from outrider.verify.score import check_prompts, count_acceptance, first_difference, run_histogram

WARM_UP_CYCLES = 8
FIRST_POSITION_BIN, FIRST_CONTEXT_BIN = 32, 128  # tokens; each further bin is twice as wide

Grade = Callable[[int, Sequence[int]], bool | None]


@dataclass(frozen=True)
class Trial:
    """How to measure. `batch_sizes`: the first gives the accepted lengths, all give speeds. `execution`: of both sides alike.

    `grade(prompt index, new tokens)` says whether an answer is right, or None where that prompt has no answer.
    """

    batch_sizes: tuple[int, ...]
    execution: str
    grade: Grade | None


@dataclass
class Side:
    """One of the contestants: its texts in the prompts' order, the wall seconds of their batches, and of its stages."""

    decoder: Decoder | LookupDecoder
    texts: list[Decoded] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        began = time.perf_counter()
        self.texts += self.decoder.decode(prompts, seeds=seeds, stops=None)
        self.seconds += time.perf_counter() - began  # decode reads every token on the host, so nothing is under way

    @property
    def rate(self) -> float:
        """New tokens a second."""
        return sum(len(text.tokens) for text in self.texts) / self.seconds

    @property
    def answer_rate(self) -> float | None:
        """New tokens a second after each prompt was read and its first token known; None where every text ended with that one."""
        assert isinstance(self.decoder, Decoder)
        reading = sum(self.decoder.clock.seconds(PROMPT))
        return sum(len(text.tokens) - 1 for text in self.texts) / (self.seconds - reading) or None

    def stage_ms(self, stage: str) -> float | None:
        """Mean milliseconds of a stage of a cycle, or None where there is none."""
        seconds = self.decoder.clock.seconds(stage) if isinstance(self.decoder, Decoder) else []
        return 1000 * sum(seconds) / len(seconds) if seconds else None


def evaluate(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], options: DecodeOptions, trial: Trial, *,
    kinds: Sequence[str] | None, rivals: Mapping[str, Drafter | None],
) -> dict[str, Any]:
    """Accepted length, losslessness and speed-up over prompts, as `outrider evaluate --json` gives them.

    `kinds` names each prompt's kind, or None. `rivals`: other drafters for the same prompts; None in place of one
    is n-gram prompt lookup. All sides take turns, batch by batch, after a warm-up. `speedup` is that of tokens per second.
    Sampled texts differ by chance, so there `identical` is None. Raises UserError when target, drafter and prompts do not fit.
    """
    for one in (drafter, *(rival for rival in rivals.values() if rival is not None)):
        check_prompts(target, one, prompts, options)
    assert kinds is None or len(kinds) == len(prompts)
    K = drafter.shape.block_size
    with ProgressBar("evaluate", total=len(prompts) * len(trial.batch_sizes), unit="prompts") as bar:
        speeds = []
        for size in trial.batch_sizes:
            ours, alone = _race(target, [drafter, None], prompts, options, trial, size, bar)
            speeds.append(_speed(target, prompts, ours, alone, options, size))
            if size == trial.batch_sizes[0]:
                first_ours, first_alone = ours, alone
    ours, alone, speed = first_ours, first_alone, speeds[0]
    report = count_acceptance(ours.texts, K)
    result = {
        "tau": report.tau,
        "acceptance_by_slot": report.acceptance_by_slot,
        "survival_by_slot": report.survival_by_slot,
        "acceptance_rate": acceptance_rate(ours.texts) if not options.tree_budget else None,
        **{key: speed[key] for key in ("identical", "first_difference", "speedup", "tokens_per_s", "baseline_tokens_per_s",
                                       "seconds", "baseline_seconds")},
        "tokens": report.tokens,
        "forwards": report.forwards,
        "accepted_run_histogram": run_histogram(report, K),
        "by_position": by_bins(ours.texts, [0] * len(prompts), first=FIRST_POSITION_BIN),
        "by_context": by_bins(ours.texts, [len(prompt) for prompt in prompts], first=FIRST_CONTEXT_BIN),
        "speed_by_batch": speeds,
        "accuracy": _accuracy(trial.grade, ours, alone),
        "rivals": {name: _rival(target, rival, prompts, options, trial, alone) for name, rival in rivals.items()},
        "conditions": conditions(target, drafter, options, trial, prompts=len(prompts), kinds=kinds),
    }
    if kinds is not None:
        result["by_kind"] = {kind: _one_kind(kind, kinds, ours, alone, K, trial) for kind in sorted(set(kinds))}
        result["tau_by_kind"] = {kind: row["tau"] for kind, row in result["by_kind"].items()}
    return result


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """`"8"` or `"1,8,32"` as numbers. Raises UserError."""
    sizes = tuple(int(part) if part.strip().isdigit() else 0 for part in text.split(","))
    if min(sizes) < 1:
        raise UserError(f"--batch-size {text}: must be a number of at least 1, or several with commas between")
    return sizes


def _race(
    target: Target, drafters: Sequence[Drafter | None], prompts: Sequence[Sequence[int]], options: DecodeOptions, trial: Trial,
    size: int, bar: ProgressBar,
) -> list[Side]:
    """The sides' texts of all prompts, `size` at a time, in turns; None is the target alone."""
    rows, longest = min(size, len(prompts)), max(len(prompt) for prompt in prompts)
    sides = [Side(Decoder(target, drafter, options, rows=rows, longest=longest, execution=trial.execution))
             for drafter in drafters]
    for side in sides:
        _warm_up(side, prompts[:rows])
    for start in range(0, len(prompts), rows):
        batch = prompts[start : start + rows]
        for side in sides if start // rows % 2 == 0 else sides[::-1]:  # the first to meet a width of prompts pays for it
            side.run(batch, range(options.seed + start, options.seed + start + len(batch)))
        bar.advance(len(batch), note=f"batch {size}, " + " / ".join(f"{side.rate:.1f}" for side in sides) + " tokens/s")
    return sides


def _warm_up(side: Side, prompts: Sequence[Sequence[int]]) -> None:
    """A few cycles that count for nothing."""
    assert isinstance(side.decoder, Decoder)
    cycles = side.decoder.cycles(prompts, seeds=range(len(prompts)), stops=None)
    for _ in zip(range(WARM_UP_CYCLES), cycles, strict=False):
        pass
    side.decoder.clock.marks.clear()


def _speed(
    target: Target, prompts: Sequence[Sequence[int]], ours: Side, alone: Side, options: DecodeOptions, size: int
) -> dict[str, Any]:
    greedy = options.temperature == 0
    difference = first_difference(target, prompts, ours.texts, alone.texts) if greedy else None
    rate, rate_alone = ours.answer_rate, alone.answer_rate
    return {
        "batch": size, "tokens_per_s": ours.rate, "baseline_tokens_per_s": alone.rate, "speedup": ours.rate / alone.rate,
        "seconds": ours.seconds, "baseline_seconds": alone.seconds,
        "speedup_after_prompts": rate / rate_alone if rate and rate_alone else None,
        "draft_ms": ours.stage_ms(DRAFT), "target_ms": ours.stage_ms(TARGET), "baseline_target_ms": alone.stage_ms(TARGET),
        "identical": difference is None if greedy else None, "first_difference": difference,
    }


def _rival(
    target: Target, rival: Drafter | None, prompts: Sequence[Sequence[int]], options: DecodeOptions, trial: Trial, alone: Side
) -> dict[str, Any]:
    """Another way to draft, on the same prompts at the same batch size as `alone`; lookup knows batches of one only."""
    if rival is None:
        reason = LookupDecoder.refusal(target, options, batch_size=trial.batch_sizes[0])
        if reason is not None:
            return {"refused": reason}
        LookupDecoder(target, options).decode(prompts[:1], seeds=[0], stops=None)  # warm-up
        side, name = Side(LookupDecoder(target, options)), "lookup"
        for i, prompt in enumerate(prompts):
            side.run([prompt], [options.seed + i])
        tau = side.decoder.tau if isinstance(side.decoder, LookupDecoder) else 1.0
    else:
        name = "drafter"
        with ProgressBar("rival", total=len(prompts), unit="prompts") as bar:
            (side,) = _race(target, [rival], prompts, options, trial, trial.batch_sizes[0], bar)
        tau = count_acceptance(side.texts, rival.shape.block_size).tau
    same = [a.tokens == b.tokens for a, b in zip(side.texts, alone.texts, strict=True)]
    return {"means": name, "tau": tau, "tokens_per_s": side.rate, "speedup": side.rate / alone.rate,
            "identical": all(same) if options.temperature == 0 else None}


def _one_kind(kind: str, kinds: Sequence[str], ours: Side, alone: Side, K: int, trial: Trial) -> dict[str, Any]:
    """`speedup` is that of this kind's texts where each has its wall to itself, None where batches mix kinds."""
    chosen = [i for i, name in enumerate(kinds) if name == kind]
    report = count_acceptance([ours.texts[i] for i in chosen], K)
    tokens = sum(len(ours.texts[i].tokens) for i in chosen)
    alone_tokens = sum(len(alone.texts[i].tokens) for i in chosen)
    alone_seconds = sum(alone.texts[i].seconds for i in chosen)
    return {"prompts": len(chosen), "tau": report.tau, "forwards": report.forwards, "tokens": tokens,
            "mean_answer_tokens": tokens / len(chosen), "acceptance_by_slot": report.acceptance_by_slot,
            "accuracy": _share_right(trial.grade, {i: ours.texts[i] for i in chosen}),
            "speedup": tokens / report.seconds / (alone_tokens / alone_seconds) if trial.batch_sizes[0] == 1 else None}


def acceptance_rate(texts: Sequence[Decoded]) -> float | None:
    """The share of the draft tokens verified that were accepted, as engines count it; None where none was drafted."""
    drafted = sum(cycle.drafted for text in texts for cycle in text.cycles[1:])
    return sum(sum(text.runs) for text in texts) / drafted if drafted else None


def _accuracy(grade: Grade | None, ours: Side, alone: Side) -> dict[str, float | None] | None:
    """The share of right answers on both sides, or None where no prompt has an answer."""
    if grade is None:
        return None
    return {name: _share_right(grade, dict(enumerate(side.texts))) for name, side in (("drafted", ours), ("alone", alone))}


def _share_right(grade: Grade | None, texts: Mapping[int, Decoded]) -> float | None:
    marks = [mark for i, text in texts.items() if grade and (mark := grade(i, text.tokens)) is not None]
    return sum(marks) / len(marks) if marks else None


def by_bins(texts: Sequence[Decoded], starts: Sequence[int], *, first: int) -> list[dict[str, Any]]:
    """Accepted length by where the cycle's anchor stands, counted from `starts` before each text: tokens / forwards a bin.

    Bins are [0, first), [first, 2 first), [2 first, 4 first), ..; empty ones are left out.
    """
    tokens: dict[int, int] = {}
    forwards: dict[int, int] = {}
    for text, start in zip(texts, starts, strict=True):
        anchor = start
        for i, cycle in enumerate(text.cycles):
            if i:
                bin = 0 if anchor < first else (anchor // first).bit_length()
                tokens[bin] = tokens.get(bin, 0) + len(cycle.tokens)
                forwards[bin] = forwards.get(bin, 0) + 1
            anchor += len(cycle.tokens)
    return [{"from": 0 if bin == 0 else first << (bin - 1), "below": first << bin, "forwards": forwards[bin],
             "tau": tokens[bin] / forwards[bin]} for bin in sorted(forwards)]


def conditions(
    target: Target, drafter: Drafter, options: DecodeOptions, trial: Trial, *, prompts: int, kinds: Sequence[str] | None
) -> dict[str, Any]:
    """What a measured number needs beside it (04-pitfalls, 30)."""
    return {
        "prompts": prompts,
        "kinds": {kind: list(kinds).count(kind) for kind in sorted(set(kinds))} if kinds is not None else None,
        "temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k, "seed": options.seed,
        "max_new_tokens": options.max_new_tokens, "stop_ids": list(options.stop_ids),
        "block_size": drafter.shape.block_size, "tree_budget": options.tree_budget,
        "batch_sizes": list(trial.batch_sizes), "execution": trial.execution,
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "drafter_dtype": str(drafter.norm.weight.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device.type,
        "torch": torch.__version__, "threads": torch.get_num_threads(),
        "baseline": f"target alone, {trial.execution}, same machine, in turns with the drafter",
    }
