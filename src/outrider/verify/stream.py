"""Takes a target, a drafter and prompts, gives answers on stdout as they come, and how they came; knows no templates."""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.features.target import Target
from outrider.model.drafter import Drafter
from outrider.progress import say
from outrider.verify.decode import DRAFT, TARGET, Cycle, Decoded, Decoder, check_prompt
from outrider.verify.sampling import DecodeOptions
from outrider.verify.score import count_acceptance, run_histogram
from outrider.verify.stops import StopStrings

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
UNFINISHED = "�"  # what a tokenizer gives for bytes that the next token completes

Message = dict[str, str]


class TextStream:
    """Prints the text of tokens as they come, each piece in the colour of the token that completed it; no stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: StopStrings | None, *, colour: bool) -> None:
        self.tokenizer, self.stops, self.colour = tokenizer, stops, colour
        self.ids: list[int] = []
        self.printed = ""

    @property
    def text(self) -> str:
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        return self.stops.cut(text) if self.stops else text

    def add(self, token: int, *, guessed: bool) -> None:
        self.ids.append(token)
        text = self.text
        if not text.endswith(UNFINISHED):
            self._print(text[: len(text) - (self.stops.begun(text) if self.stops else 0)], guessed=guessed)

    def close(self) -> str:
        text = self.text
        self._print(text, guessed=False)
        print(flush=True)
        return text

    def _print(self, text: str, *, guessed: bool) -> None:
        new, self.printed = text[len(self.printed):], text
        sys.stdout.write(f"{GREEN}{new}{PLAIN}" if guessed and self.colour and new else new)
        sys.stdout.flush()


@dataclass(frozen=True)
class Writer:
    """Answers one prompt at a time. `execution`: see verify.execution. `colour`: what the drafter guessed right is green."""

    target: Target
    drafter: Drafter
    tokenizer: PreTrainedTokenizerBase
    options: DecodeOptions
    stops: StopStrings | None
    execution: str
    colour: bool

    def answer(self, prompt_ids: list[int], *, turn: int = 0) -> dict[str, Any]:
        """Continue the prompt, printing as it goes. Draws from a seed of its own for each `turn`.

        Gives `text`, `tokens`, `tau`, `accepted` (draft tokens kept), `forwards` (of the target, after the prompt's own),
        `accepted_run_histogram` (how many forwards kept 0, 1, .. draft tokens), `draft_seconds`, `target_seconds`, `seconds`.
        """
        check_prompt(prompt_ids, self.options, self.target.facts, name="prompt")
        decoder = Decoder(self.target, self.drafter, self.options, rows=1, longest=len(prompt_ids), execution=self.execution)
        out = TextStream(self.tokenizer, self.stops, colour=self.colour)
        cycles: list[Cycle] = []
        started = time.perf_counter()
        for (cycle,) in decoder.cycles([prompt_ids], seeds=[self.options.seed + turn], stops=self.stops):
            assert cycle is not None
            cycles.append(cycle)
            for token in cycle.accepted:
                out.add(token, guessed=True)
            if cycle.bonus is not None:
                out.add(cycle.bonus, guessed=False)
        seconds = time.perf_counter() - started
        K = self.drafter.shape.block_size
        report = count_acceptance([Decoded(out.ids, tuple(cycles), seconds)], K)
        result = {
            "text": out.close(), "tokens": len(out.ids), "tau": report.tau, "accepted": sum(map(sum, report.runs)),
            "forwards": report.forwards, "accepted_run_histogram": run_histogram(report, K),
            "draft_seconds": sum(decoder.clock.seconds(DRAFT)), "target_seconds": sum(decoder.clock.seconds(TARGET)),
            "seconds": seconds,
        }
        _say_how(result)
        return result

    def converse(self, prompt_of: Callable[[list[Message]], list[int]], turns: Iterable[str]) -> dict[str, Any]:
        """Answer each of `turns`, everything said before in view; `prompt_of` puts a conversation into tokens.

        Gives the conversation as `messages`, the answers' own results as `turns`, and their sums.
        """
        messages: list[Message] = []
        answers: list[dict[str, Any]] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            answers.append(self.answer(prompt_of(messages), turn=len(answers)))
            messages.append({"role": "assistant", "content": answers[-1]["text"]})
        sums = {key: sum(answer[key] for answer in answers) for key in ("tokens", "accepted", "forwards", "seconds")}
        tau = (sums["tokens"] - len(answers)) / sums["forwards"] if sums["forwards"] else 1.0
        return {"messages": messages, "turns": answers, **sums, "tau": tau}


def _say_how(result: dict[str, Any]) -> None:
    tokens, seconds, forwards = result["tokens"], result["seconds"], result["forwards"]
    say(f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} tokens/s), {result['accepted']} of them guessed by the "
        f"drafter, tau {result['tau']:.2f}")
    if forwards:
        runs = ", ".join(f"{run}: {count}" for run, count in enumerate(result["accepted_run_histogram"]))
        draft_ms, target_ms = (1000 * result[key] / forwards for key in ("draft_seconds", "target_seconds"))
        say(f"{forwards} cycles, by draft tokens kept {runs}; a cycle's draft {draft_ms:.1f} ms, its target forward "
            f"{target_ms:.1f} ms")
