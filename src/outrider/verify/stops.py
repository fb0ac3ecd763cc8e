"""Takes strings that end a text, watches tokens as they come, says at which token one is complete; knows nothing of models."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from outrider.errors import UserError


@dataclass(frozen=True)
class StopStrings:
    """Strings, any of which ends a text. Raises UserError for an empty one."""

    tokenizer: PreTrainedTokenizerBase
    strings: tuple[str, ...]

    def __post_init__(self) -> None:
        if "" in self.strings:
            raise UserError("stop: an empty string would end every text at once: leave it out")

    def text(self) -> "WatchedText":
        """A new text to watch."""
        return WatchedText(self)

    def cut(self, text: str) -> str:
        """`text` up to the first of the strings, without it."""
        return text[: min((text.find(stop) for stop in self.strings if stop in text), default=len(text))]

    def begun(self, text: str) -> int:
        """How many letters at the end of `text` may be the beginning of one of the strings."""
        return max((n for stop in self.strings for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@dataclass
class WatchedText:
    """The new tokens of one text so far."""

    stops: StopStrings
    ids: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int]) -> int | None:
        """Take the next tokens; how many of them stay when one completes a stop string, or None when none does.

        The whole text is decoded each time, since a string may begin many tokens back and a token may be half a letter.
        """
        for i, token in enumerate(tokens):
            self.ids.append(token)
            text = self.stops.tokenizer.decode(self.ids, skip_special_tokens=True)
            if any(stop in text for stop in self.stops.strings):
                return i + 1
        return None
