"""Runs in vLLM's environment: takes a target, a drafter and prompts (JSON on stdin), prints texts and vLLM's own counts as JSON.

In: {"target", "drafter" or null, "drafts", "prompts": [[ids]], "limits": [one a prompt], "stop_ids"}. Out, last line:
{"version", "runs": [{"tokens", "drafts", "drafted", "accepted"}]}.
"""

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")


def main() -> None:
    from vllm import LLM, SamplingParams, __version__

    job = json.load(sys.stdin)
    # a speculators folder says method and number of drafted tokens itself; the published one needs both
    speculative = None if job["drafter"] is None else {
        "method": "dflash", "model": job["drafter"], "num_speculative_tokens": job["drafts"]}
    engine = LLM(model=job["target"], dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=1,
                 disable_log_stats=False, enable_prefix_caching=False, speculative_config=speculative)
    runs, before = [], counts(engine)
    for prompt, limit in zip(job["prompts"], job["limits"], strict=True):
        sampling = SamplingParams(temperature=0.0, max_tokens=limit, stop_token_ids=job["stop_ids"], ignore_eos=True)
        text = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0].token_ids
        after = counts(engine)
        drafts, drafted, accepted = (b - a for a, b in zip(before, after, strict=True))
        runs.append({"tokens": list(text), "drafts": drafts, "drafted": drafted, "accepted": accepted})
        before = after
    print(json.dumps({"version": __version__, "runs": runs}), flush=True)


def counts(engine: Any) -> tuple[int, ...]:
    found = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    return tuple(found.get(f"vllm:spec_decode_num_{name}", 0) for name in COUNTERS)


if __name__ == "__main__":
    main()
