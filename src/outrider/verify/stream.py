"""Takes a target, a drafter and a prompt, gives the answer on stdout as it comes; knows nothing of measurement."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.features.target import Target
from outrider.model.drafter import Drafter
from outrider.progress import say
from outrider.verify.decode import Cycle, Decoded, speculate_cycles
from outrider.verify.execution import EAGER
from outrider.verify.sampling import DecodeOptions
from outrider.verify.score import count_acceptance

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
UNFINISHED = "�"  # what a tokenizer gives for bytes that the next token completes


class TextStream:
    """Prints the text of tokens as they come, each piece in the colour of the token that completed it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, colour: bool) -> None:
        self.tokenizer, self.colour = tokenizer, colour
        self.ids: list[int] = []
        self.printed = ""

    def add(self, token: int, *, guessed: bool) -> None:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith(UNFINISHED):
            self._print(text, guessed=guessed)

    def close(self) -> str:
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        self._print(text, guessed=False)
        print(flush=True)
        return text

    def _print(self, text: str, *, guessed: bool) -> None:
        new, self.printed = text[len(self.printed):], text
        sys.stdout.write(f"{GREEN}{new}{PLAIN}" if guessed and self.colour and new else new)
        sys.stdout.flush()


def stream(
    target: Target, drafter: Drafter, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], options: DecodeOptions, *,
    colour: bool,
) -> dict[str, Any]:
    """Continue the prompt, printing as it goes; gives `text`, `tokens`, `tau`, `accepted` (draft tokens kept), `seconds`."""
    out = TextStream(tokenizer, colour=colour)
    cycles: list[Cycle] = []
    started = time.perf_counter()
    for cycle in speculate_cycles(target, drafter, prompt_ids, options, execution=EAGER, stops=None):
        cycles.append(cycle)
        for token in cycle.accepted:
            out.add(token, guessed=True)
        if cycle.bonus is not None:
            out.add(cycle.bonus, guessed=False)
    seconds = time.perf_counter() - started
    text = out.close()
    tokens, accepted = len(out.ids), sum(len(cycle.accepted) for cycle in cycles)
    tau = count_acceptance([Decoded(out.ids, tuple(cycles), seconds)], drafter.shape.block_size).tau
    say(f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} tokens/s), {accepted} of them guessed by the drafter, "
        f"tau {tau:.2f}")
    return {"text": text, "tokens": tokens, "tau": tau, "accepted": accepted, "seconds": seconds}
