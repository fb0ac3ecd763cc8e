"""What is a drafter worth on public prompt sets: accepted length by kind, speed against the target alone, by batch and tree?

    python bench/decoding.py --target runs/small/target --drafter runs/small/drafter --device cuda --out decoding.jsonl

Each set is measured with `outrider evaluate`'s own code: both sides in turns, in one process. One line a set, batch size and tree
budget as it comes; --out keeps each whole result as a line of JSON. --peer: against z-lab's own loop (package dflash) instead.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from outrider import cli
from outrider.data.questions import read_questions
from outrider.data.sets import SETS
from outrider.features.target import Target, load_target, load_tokenizer
from outrider.model.drafter import Drafter
from outrider.verify.decode import Decoded, decode
from outrider.verify.execution import EAGER, GRAPH
from outrider.verify.sampling import DecodeOptions
from outrider.weights.opening import open_drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--limit", type=int, default=None, help="only the first so many prompts of a set")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch-size", default="1")
    parser.add_argument("--trees", default="0", help="budgets, such as 0,8,32; 0 is the chain")
    parser.add_argument("--execution", default=None)
    parser.add_argument("--rival", action="append")
    parser.add_argument("--peer", action="store_true", help="z-lab's loop instead, one prompt at a time")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    for name in given.sets.split(","):
        if given.peer:
            _keep(given.out, {"set": name, **_against_peer(given, name)})
            continue
        for budget in map(int, given.trees.split(",")):
            result = cli.evaluate(
                target=given.target,
                drafter=given.drafter,
                prompt_set=name,
                limit=given.limit,
                max_new_tokens=given.max_new_tokens,
                temperature=given.temperature,
                batch_size=given.batch_size,
                execution=given.execution,
                rival=given.rival,
                dtype=given.dtype,
                device=given.device,
                tree_budget=budget,
            )
            _print(name, budget, result)
            _keep(given.out, {"set": name, "tree_budget": budget, **result})


def _keep(out: Path | None, result: dict[str, Any]) -> None:
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result, default=str) + "\n")


def _print(name: str, budget: int, result: dict[str, Any]) -> None:
    for row in result["speed_by_batch"]:
        times = [row[key] for key in ("draft_ms", "target_ms", "baseline_target_ms")]
        stages = " / ".join("-" if ms is None else f"{ms:.2f}" for ms in times)
        print(
            f"{name:10} batch {row['batch']:2} tree {budget:3}: tau {result['tau']:.3f}, {row['tokens_per_s']:8.1f} drafted, "
            f"{row['baseline_tokens_per_s']:8.1f} alone tokens/s, {row['speedup']:.2f} x, draft / target / alone {stages} ms, "
            f"same text {row['identical']}",
            flush=True,
        )
    kinds = result.get("tau_by_kind") or {}
    print(
        f"{name:10} by kind: {', '.join(f'{kind} {tau:.3f}' for kind, tau in kinds.items())}; right {result['accuracy']}; rivals "
        f"{json.dumps(result['rivals'])}",
        flush=True,
    )


def _against_peer(given: argparse.Namespace, name: str) -> dict[str, Any]:
    """Accepted length and milliseconds a token, ours and z-lab's, prompt by prompt in turns after one prompt of warm-up."""
    tokenizer = load_tokenizer(given.target)
    target = load_target(given.target, dtype=given.dtype, device=given.device, last_layer=None, head=True)
    drafter = open_drafter(given.drafter, dtype=given.dtype, device=given.device)
    prompts = read_questions(None, name, tokenizer, limit=given.limit, thinking=None).prompts
    options = DecodeOptions.greedy(max_new_tokens=given.max_new_tokens, stop_ids=tuple(target.stop_ids(tokenizer)))
    executions = [EAGER, GRAPH] if target.device.type == "cuda" else [EAGER]
    tokens_ms: dict[str, list[float]] = {way: [] for way in ("peer", *executions)}
    produced: dict[str, list[int]] = {"peer": [], EAGER: []}
    same = 0
    for i, prompt in enumerate([prompts[0], *prompts]):
        theirs, their_ms = _peer(given, target, prompt, options)
        ours = {way: _ours(target, drafter, prompt, options, way) for way in executions}
        if i:
            same += [*prompt, *ours[EAGER][0].tokens] == theirs.output_ids[0].tolist()
            produced["peer"] += theirs.acceptance_lengths
            produced[EAGER] += ours[EAGER][0].acceptance_lengths
            for way, ms in (("peer", their_ms), *((way, ms) for way, (_, ms) in ours.items())):
                tokens_ms[way].append(ms)
    result = {
        "prompts": len(prompts),
        "same_texts": same,
        "dtype": given.dtype,
        "device": given.device,
        "tau_peer": statistics.fmean(produced["peer"]),
        "tau_ours": statistics.fmean(produced[EAGER]),
        "forwards_peer": len(produced["peer"]),
        "forwards_ours": len(produced[EAGER]),
        "ms_a_token": {way: statistics.median(found) for way, found in tokens_ms.items()},
        "peer_over_ours": {
            way: list(_quartiles([a / b for a, b in zip(tokens_ms["peer"], found, strict=True)]))
            for way, found in tokens_ms.items()
            if way != "peer"
        },
    }
    print(f"{name:10} {json.dumps(result)}", flush=True)
    return result


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    """Least, median, greatest."""
    return min(values), statistics.median(values), max(values)


def _ours(target: Target, drafter: Drafter, prompt: list[int], options: DecodeOptions, way: str) -> tuple[Decoded, float]:
    """The text, and milliseconds a token after the prompt was read; what is captured or compiled is not counted."""
    batch = decode(target, drafter, [prompt], options, batch_size=1, execution=way, stops=None)
    seconds = batch.seconds - sum(batch.prompt_seconds)
    return batch.texts[0], 1000 * seconds / len(batch.texts[0].tokens)


_PEERS: dict[str, Any] = {}


def _peer(given: argparse.Namespace, target: Target, prompt: list[int], options: DecodeOptions) -> tuple[Any, float]:
    from dflash import model as peer

    if "model" not in _PEERS:
        loaded = peer.DFlashDraftModel.from_pretrained(given.drafter, dtype=getattr(torch, given.dtype))
        _PEERS["model"] = loaded.to(target.device).eval()
        if target.device.type != "cuda":
            peer._cuda_time = time.perf_counter  # its clock knows CUDA only
    found = peer.dflash_generate(
        _PEERS["model"],
        target.model,
        torch.tensor([prompt], device=target.device),
        options.max_new_tokens,
        list(options.stop_ids),
        return_stats=True,
    )
    return found, 1000 * found.time_per_output_token


if __name__ == "__main__":
    main()
