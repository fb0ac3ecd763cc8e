"""Answers as a serving engine would, or as a broken one does; nothing is computed."""

import json
from typing import Any


class Engine:
    """Answers a prompt [n, ..] with n tokens 1, 2, ..; each forward drafts 3 tokens and accepts 1."""

    def __init__(self, name: str, *, drafts: bool = True, wrong: bool = False) -> None:
        self.name, self.drafts, self.wrong = name, drafts, wrong
        self.forwards = 100  # counted before we came

    def __call__(self, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, b'{"data": [{"id": "toy"}]}'
        if path == "/metrics":
            return 200, self.metrics().encode()
        assert body is not None
        prompt = body["input_ids"] if self.name == "sglang" else body["prompt"]
        limit = body.get("max_tokens", body.get("n_predict"))
        if self.name == "sglang":
            limit = body["sampling_params"]["max_new_tokens"]
        count = min(prompt[0], limit)
        tokens = [*range(1, count), 99] if self.wrong else list(range(1, count + 1))
        forwards = (count - 1) // 2
        self.forwards += forwards
        return 200, json.dumps(self.form(tokens, forwards)).encode()

    def form(self, tokens: list[int], forwards: int) -> dict[str, Any]:
        if self.name == "vllm":
            return {"choices": [{"token_ids": tokens}]}
        if self.name == "sglang":
            meta = {"spec_verify_ct": forwards, "spec_num_proposed_drafts": 3 * forwards, "spec_num_correct_drafts": forwards,
                    "spec_correct_drafts_histogram": [0, forwards, 0, 0]}
            return {"output_ids": tokens, "meta_info": meta if self.drafts else {}}
        timings = {"predicted_n": len(tokens), "draft_n": 3 * forwards, "draft_n_accepted": forwards}
        return {"tokens": tokens, "timings": timings if self.drafts else {"predicted_n": len(tokens)}}

    def metrics(self) -> str:
        n = self.forwards
        counts = {"drafts": n, "draft_tokens": 3 * n, "accepted_tokens": n}
        counters = "".join(f'vllm:spec_decode_num_{name}_total{{engine="{e}",model_name="toy"}} {value / 2}\n'
                           for name, value in counts.items() for e in "01")
        by_slot = "".join(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{p}"}} {float(v)}\n'
                          for p, v in ((0, n), (2, 0), (1, 0)))
        return "# HELP vllm:nothing of ours\nvllm:e2e_seconds_bucket{le=\"+Inf\"} 3.0\nodd line\n" + (
            counters + by_slot if self.drafts else "")
