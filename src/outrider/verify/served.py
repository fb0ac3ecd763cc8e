"""Takes a running server, perhaps a second one without the drafter, and prompts, gives what `evaluate` gives; loads no model."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from outrider.errors import UserError
from outrider.progress import ProgressBar
from outrider.verify.engines import Engine, ServerAnswer, ServerCounts, open_engine
from outrider.verify.sampling import DecodeOptions, count_equal

WARM_UP_TOKENS = 8


def evaluate_server(
    name: str, url: str | None, baseline_url: str | None, prompts: Sequence[Sequence[int]], options: DecodeOptions, *,
    concurrency: int,
) -> dict[str, Any]:
    """Accepted length from the server's own counts, the wall with and without the drafter, and whether the texts are the same.

    `concurrency` requests run at a time. tau counts every drafted forward that the engine counts. Other users of the server
    would be counted too, so it must serve nobody else. Raises UserError naming the address for whatever goes wrong.
    """
    if url is None:
        raise UserError(f"--engine {name}: needs --base-url, the address of the server")
    if concurrency < 1:
        raise UserError(f"--concurrency {concurrency}: must be at least 1")
    engine = open_engine(name, url, drafts=True)
    baseline = None if baseline_url is None else open_engine(name, baseline_url, drafts=False)
    warm_up = replace(options, max_new_tokens=min(WARM_UP_TOKENS, options.max_new_tokens))
    for one in (engine, baseline):
        if one is not None:
            one.answer(prompts[0], warm_up)
    before = engine.counters()
    answers, seconds = answer_all(engine, prompts, options, concurrency=concurrency, label="with the drafter")
    after = engine.counters()
    counts = after - before if after is not None and before is not None else _sum(answers)
    alone, alone_seconds = (answer_all(baseline, prompts, options, concurrency=concurrency, label="target alone")
                            if baseline is not None else (None, None))
    difference = _first_difference(answers, alone) if alone is not None and options.temperature == 0 else None
    rate = _rate(answers, seconds)
    baseline_rate = _rate(alone, alone_seconds) if alone is not None and alone_seconds is not None else None
    return {
        "tau": 1 + counts.accepted / counts.forwards if counts.forwards else 1.0,
        "acceptance_by_slot": _conditional(counts),
        "identical": difference is None if alone is not None and options.temperature == 0 else None,
        "first_difference": difference,
        "speedup": rate / baseline_rate if baseline_rate else None,
        "tokens_per_s": rate, "baseline_tokens_per_s": baseline_rate,
        "seconds": seconds, "baseline_seconds": alone_seconds,
        "tokens": sum(len(answer.tokens) for answer in answers),
        "forwards": counts.forwards, "drafted": counts.drafted, "accepted": counts.accepted,
        "conditions": {
            "engine": name, "base_url": engine.url, "prompts": len(prompts), "concurrency": concurrency,
            "temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k, "seed": options.seed,
            "max_new_tokens": options.max_new_tokens, "stop_ids": list(options.stop_ids),
            "counts": "the server's own, with every request that it answered meanwhile",
            "baseline": f"the server at {baseline.url}, same prompts, after" if baseline is not None
                        else "none was named (--baseline-url): no speed-up and no comparison of texts",
        },
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


def _sum(answers: Sequence[ServerAnswer]) -> ServerCounts:
    forwards, drafted, accepted = (sum(getattr(answer, key) for answer in answers) for key in ("forwards", "drafted", "accepted"))
    return ServerCounts(forwards, drafted, accepted, [])


def _conditional(counts: ServerCounts) -> list[float] | None:
    """Slots 1, 2, ..: share accepted among the forwards whose earlier slots all were; None where the engine does not say.

    Drafts cut at the end of a text make it a little lower than the decoder's own.
    """
    reached = [counts.forwards, *counts.accepted_by_slot]
    return [a / r if r else 0.0 for r, a in zip(reached, counts.accepted_by_slot, strict=False)] or None


def _first_difference(answers: Sequence[ServerAnswer], alone: Sequence[ServerAnswer]) -> dict[str, Any] | None:
    """Where the two servers' texts first part; a server gives no logits, so a tie of rounding cannot be told from an error."""
    for i, (ours, theirs) in enumerate(zip(answers, alone, strict=True)):
        if ours.tokens != theirs.tokens:
            at = count_equal(ours.tokens, theirs.tokens)
            speculative, target = (a.tokens[at] if at < len(a.tokens) else None for a in (ours, theirs))
            return {"prompt": i, "position": at, "speculative_token": speculative, "target_token": target, "gap": None,
                    "resolution": None, "kind": "unknown"}
    return None


def _rate(answers: Sequence[ServerAnswer], seconds: float) -> float:
    return sum(len(answer.tokens) for answer in answers) / seconds
