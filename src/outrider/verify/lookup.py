"""Takes a target and prompts, gives texts drafted by transformers' n-gram prompt lookup; knows no drafter."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from outrider.features.target import Target
from outrider.verify.decode import Cycle, Decoded
from outrider.verify.rollback import LINEAR, layer_kinds
from outrider.verify.sampling import DecodeOptions
from outrider.verify.stops import StopStrings

LOOKUP_TOKENS = 10  # drafted at most a forward, as in transformers' documentation


class LookupDecoder:
    """Continues one prompt at a time, greedily; counts the target's forwards."""

    def __init__(self, target: Target, options: DecodeOptions) -> None:
        self.target, self.options = target, options
        self.tokens = self.forwards = 0  # after each prompt's own forward

    @staticmethod
    def refusal(target: Target, options: DecodeOptions, *, batch_size: int) -> str | None:
        """Why lookup cannot be measured here, or None."""
        if options.temperature != 0:
            return "greedy only"
        if batch_size != 1:
            return "transformers looks up for one prompt at a time: give 1 as the first batch size"
        if LINEAR in layer_kinds(target.model.config.get_text_config()):
            return "transformers cannot roll back a recurrent layer's state"
        return None

    @property
    def tau(self) -> float:
        """Tokens a target forward, the prompts' own left out."""
        return self.tokens / self.forwards if self.forwards else 1.0

    @torch.no_grad()
    def decode(self, prompts: Sequence[Sequence[int]], *, seeds: Sequence[int], stops: StopStrings | None) -> list[Decoded]:
        """The continuation of the one prompt; `seeds` are for the interface, nothing is drawn."""
        (prompt,) = prompts
        assert stops is None
        forwards = 0

        def count(*ignored: Any) -> None:
            nonlocal forwards
            forwards += 1

        began = time.perf_counter()
        ids_BS = torch.tensor([list(prompt)], device=self.target.device)
        hook = self.target.model.register_forward_hook(count)
        try:
            out_BS = self.target.model.generate(
                input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS), max_new_tokens=self.options.max_new_tokens,
                do_sample=False, prompt_lookup_num_tokens=LOOKUP_TOKENS,
                eos_token_id=list(self.options.stop_ids) or None, pad_token_id=0,
            )
        finally:
            hook.remove()
        tokens = out_BS[0, len(prompt) :].tolist()
        self.tokens, self.forwards = self.tokens + len(tokens) - 1, self.forwards + forwards - 1
        return [Decoded(tokens, (Cycle((), tokens[0], 0),), time.perf_counter() - began)]
