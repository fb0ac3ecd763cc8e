"""How long two kinds of work of a trace ran side by side."""

from collections.abc import Sequence

from outrider.planner.timeline import Span


def overlap_ms(spans: Sequence[Span], one: str, other: str) -> float:
    """How long work labelled `one` and work labelled `other` ran at the same time, ms."""
    return sum(max(0.0, min(a.end, b.end) - max(a.begin, b.begin))
               for a in spans if a.label == one for b in spans if b.label == other)
