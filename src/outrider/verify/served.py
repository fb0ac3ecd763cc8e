"""Takes a running server, perhaps a second one without the drafter, and prompts, gives what `evaluate` gives; loads no model."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import UserError
from outrider.progress import ProgressBar
from outrider.verify.engines import Engine, ServerAnswer, ServerCounts, open_engine
from outrider.verify.evaluate import Grade
from outrider.verify.sampling import DecodeOptions, count_equal

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Server:
    """Where to ask. `baseline_url`: the same server started without the drafter, or None. `concurrency`: requests at a time."""

    engine: str
    url: str | None
    baseline_url: str | None
    concurrency: int


@dataclass(frozen=True)
class Part:
    """What was answered to some of the prompts (`indices`), with the drafter and, or None, by the target alone."""

    indices: list[int]
    answers: list[ServerAnswer]
    counts: ServerCounts
    seconds: float
    alone: list[ServerAnswer] | None
    alone_seconds: float | None


def refuse_given(**given: bool) -> None:
    """Raises UserError for the first option that was given although a server decides it."""
    for name, was_given in given.items():
        if was_given:
            raise UserError(f"--{name.replace('_', '-')}: a server drafts and answers as it was started: leave it out with "
                            "--engine")


def evaluate_server(
    server: Server, prompts: Sequence[Sequence[int]], options: DecodeOptions, *, kinds: Sequence[str] | None, grade: Grade | None
) -> dict[str, Any]:
    """Accepted length from the server's own counts, the wall with and without the drafter, and whether the texts are the same.

    `kinds` and `grade` as in `verify.evaluate`: kind after kind is asked, of both servers in turns, and the counters are read
    between. tau counts every forward that the engine counts. Other users of the server would be counted too, so it must serve
    nobody else. Raises UserError naming the address for whatever goes wrong.
    """
    if server.url is None:
        raise UserError(f"--engine {server.engine}: needs --base-url, the address of the server")
    if server.concurrency < 1:
        raise UserError(f"--concurrency {server.concurrency}: must be at least 1")
    engine = open_engine(server.engine, server.url, drafts=True)
    baseline = None if server.baseline_url is None else open_engine(server.engine, server.baseline_url, drafts=False)
    warm_up = replace(options, max_new_tokens=min(WARM_UP_TOKENS, options.max_new_tokens))
    for one in (engine, baseline):
        if one is not None:
            one.answer(prompts[0], warm_up)
    names = list(kinds) if kinds is not None else [""] * len(prompts)
    parts = {kind: _measure(engine, baseline, prompts, options, [i for i, name in enumerate(names) if name == kind],
                            server.concurrency) for kind in dict.fromkeys(names)}
    result = _result(list(parts.values()), greedy=options.temperature == 0, grade=grade)
    if kinds is not None:
        result["by_kind"] = {kind: _one_kind(parts[kind], grade) for kind in sorted(parts)}
        result["tau_by_kind"] = {kind: row["tau"] for kind, row in result["by_kind"].items()}
    return {**result, "conditions": _conditions(engine, baseline, server, options, kinds, len(prompts))}


def _measure(
    engine: Engine, baseline: Engine | None, prompts: Sequence[Sequence[int]], options: DecodeOptions, indices: list[int],
    concurrency: int,
) -> Part:
    chosen = [prompts[i] for i in indices]
    before = engine.counters()
    answers, seconds = answer_all(engine, chosen, options, concurrency=concurrency, label="with the drafter")
    after = engine.counters()
    counts = after - before if after is not None and before is not None else _sum(answers)
    alone, alone_seconds = (answer_all(baseline, chosen, options, concurrency=concurrency, label="target alone")
                            if baseline is not None else (None, None))
    return Part(indices, answers, counts, seconds, alone, alone_seconds)


def _result(parts: Sequence[Part], *, greedy: bool, grade: Grade | None) -> dict[str, Any]:
    """Everything but the kinds and the conditions."""
    counts, seconds = _sum([part.counts for part in parts]), sum(part.seconds for part in parts)
    answers = _in_order(parts, "answers")
    tokens = sum(len(answer.tokens) for answer in answers.values())
    result: dict[str, Any] = {
        "tau": _tau(counts), "acceptance_rate": _acceptance_rate(counts), "acceptance_by_slot": _conditional(counts),
        "identical": None, "first_difference": None,
        "speedup": None, "tokens_per_s": tokens / seconds, "baseline_tokens_per_s": None, "seconds": seconds,
        "baseline_seconds": None, "tokens": tokens,
        "forwards": counts.forwards, "drafted": counts.drafted, "accepted": counts.accepted, "accuracy": None,
    }
    accuracy = {"drafted": _share_right(grade, answers), "alone": None}
    if all(part.alone is not None for part in parts):
        alone, alone_seconds = _in_order(parts, "alone"), sum(part.alone_seconds or 0.0 for part in parts)
        rate = sum(len(answer.tokens) for answer in alone.values()) / alone_seconds
        result |= {"speedup": result["tokens_per_s"] / rate, "baseline_tokens_per_s": rate, "baseline_seconds": alone_seconds}
        if greedy:
            difference = _first_difference(answers, alone)
            result |= {"identical": difference is None, "first_difference": difference}
        accuracy["alone"] = _share_right(grade, alone)
    return {**result, "accuracy": accuracy if grade is not None else None}


def _one_kind(part: Part, grade: Grade | None) -> dict[str, Any]:
    tokens = sum(len(answer.tokens) for answer in part.answers)
    return {"prompts": len(part.indices), "tau": _tau(part.counts), "tokens": tokens,
            "mean_answer_tokens": tokens / len(part.indices), "acceptance_by_slot": _conditional(part.counts),
            "accuracy": _share_right(grade, dict(zip(part.indices, part.answers, strict=True)))}


def _conditions(
    engine: Engine, baseline: Engine | None, server: Server, options: DecodeOptions, kinds: Sequence[str] | None, prompts: int
) -> dict[str, Any]:
    return {
        "engine": server.engine, "base_url": engine.url, "prompts": prompts,
        "kinds": {kind: list(kinds).count(kind) for kind in sorted(set(kinds))} if kinds is not None else None,
        "concurrency": server.concurrency,
        "temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k, "seed": options.seed,
        "max_new_tokens": options.max_new_tokens, "stop_ids": list(options.stop_ids),
        "counts": "the server's own, with every request that it answered meanwhile",
        "baseline": f"the server at {baseline.url}, same prompts, in turns by kind" if baseline is not None
                    else "none was named (--baseline-url): no speed-up and no comparison of texts",
    }


def answer_all(
    engine: Engine, prompts: Sequence[Sequence[int]], options: DecodeOptions, *, concurrency: int, label: str
) -> tuple[list[ServerAnswer], float]:
    """Answers in order, and the wall of all of them."""
    began = time.perf_counter()
    answers = []
    with ProgressBar(label, total=len(prompts), unit="prompts") as bar, ThreadPoolExecutor(concurrency) as pool:
        try:
            for answer in pool.map(lambda prompt: engine.answer(prompt, options), prompts):
                answers.append(answer)
                bar.advance(1)
        except UserError:
            pool.shutdown(cancel_futures=True)  # the others would fail too, each after its own wait
            raise
    return answers, time.perf_counter() - began


def _in_order(parts: Sequence[Part], side: str) -> dict[int, ServerAnswer]:
    """The answers of one side by the index of their prompt."""
    found = {i: answer for part in parts for i, answer in zip(part.indices, getattr(part, side), strict=True)}
    return dict(sorted(found.items()))


def _sum(counted: Sequence[ServerAnswer] | Sequence[ServerCounts]) -> ServerCounts:
    forwards, drafted, accepted = (sum(getattr(one, key) for one in counted) for key in ("forwards", "drafted", "accepted"))
    slots = max((len(one.accepted_by_slot) for one in counted), default=0)
    by_slot = [sum(one.accepted_by_slot[slot] for one in counted if slot < len(one.accepted_by_slot)) for slot in range(slots)]
    return ServerCounts(forwards, drafted, accepted, by_slot)


def _tau(counts: ServerCounts) -> float:
    return 1 + counts.accepted / counts.forwards if counts.forwards else 1.0


def _acceptance_rate(counts: ServerCounts) -> float | None:
    return counts.accepted / counts.drafted if counts.drafted else None


def _conditional(counts: ServerCounts) -> list[float] | None:
    """Slots 1, 2, ..: share accepted among the forwards whose earlier slots all were; None where the engine does not say.

    Drafts cut at the end of a text make it a little lower than the decoder's own.
    """
    reached = [counts.forwards, *counts.accepted_by_slot]
    return [a / r if r else 0.0 for r, a in zip(reached, counts.accepted_by_slot, strict=False)] or None


def _share_right(grade: Grade | None, answers: Mapping[int, ServerAnswer]) -> float | None:
    marks = [mark for i, answer in answers.items() if grade and (mark := grade(i, answer.tokens)) is not None]
    return sum(marks) / len(marks) if marks else None


def _first_difference(answers: Mapping[int, ServerAnswer], alone: Mapping[int, ServerAnswer]) -> dict[str, Any] | None:
    """Where the two servers' texts first part; a server gives no logits, so a tie of rounding cannot be told from an error."""
    for i, ours in answers.items():
        theirs = alone[i]
        if ours.tokens != theirs.tokens:
            at = count_equal(ours.tokens, theirs.tokens)
            speculative, target = (a.tokens[at] if at < len(a.tokens) else None for a in (ours, theirs))
            return {"prompt": i, "position": at, "speculative_token": speculative, "target_token": target, "gap": None,
                    "resolution": None, "kind": "unknown"}
    return None
