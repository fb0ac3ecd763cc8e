"""Takes a step of fixed shapes, gives the same step as it stands, as a CUDA graph, or compiled inside one; knows no models."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outrider.errors import UserError

EAGER, GRAPH, COMPILED = "eager", "graph", "compiled"
WARM_UP_RUNS = 2  # the first compiles and lets libraries allocate, the second finds nothing left to do
BACKEND = "inductor"
COMPILATIONS = 64  # of one function; each batch size and block size is one, and dynamo gives up after 8


class Execution:
    """How steps run on `device`. Raises UserError for a kind that this device does not have.

    `EAGER`: as the code stands. `GRAPH`: captured once, then one launch a step. `COMPILED`: the forwards compiled, then captured.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        if kind not in (EAGER, GRAPH, COMPILED):
            raise UserError(f"execution = {kind!r}: must be '{EAGER}', '{GRAPH}' or '{COMPILED}'")
        if kind != EAGER and device.type != "cuda":
            raise UserError(f"execution = {kind!r}: needs a CUDA device, this target is on {device.type}: use '{EAGER}'")
        self.kind, self.device = kind, device

    @property
    def ahead(self) -> int:
        """Cycles to begin before the report of one is read: on a GPU the next, or it would idle while the host reads."""
        return 1 if self.device.type == "cuda" else 0

    @property
    def fixed_shapes(self) -> bool:
        """Whether all steps must have one shape: in a graph, and on a GPU, where asking for a length would wait for it."""
        return self.kind != EAGER or self.device.type == "cuda"

    def compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` compiled for the one shape that it will meet, or as it stands."""
        if self.kind != COMPILED:
            return forward
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILATIONS)
        return torch.compile(forward, dynamic=False, fullgraph=True, backend=BACKEND)

    def captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """`step`, which takes nothing and works on buffers of its own: run a few times, then captured (or as it stands)."""
        if self.kind == EAGER:
            return step
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_RUNS):
                step()
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay


def posted(values: Tensor) -> Callable[[], Tensor]:
    """Begin to copy `values` to the host; what is given waits for this copy, and for nothing that is begun later."""
    if values.device.type != "cuda":
        copied = values.clone()
        return lambda: copied
    host, arrived = torch.empty_like(values, device="cpu", pin_memory=True), torch.cuda.Event()
    host.copy_(values, non_blocking=True)
    arrived.record(torch.cuda.current_stream(values.device))

    def wait() -> Tensor:
        arrived.synchronize()
        return host

    return wait


def sent(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`, where what is begun later finds them; nothing is waited for."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


class StageClock:
    """Seconds of each stage of each cycle, on the device's own clock, without waiting for it before `seconds` is asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = self._mark()
        yield
        self.marks.setdefault(name, []).append((began, self._mark()))

    def seconds(self, name: str) -> list[float]:
        """Of each time the stage was entered, in order."""
        marks = self.marks.get(name, [])
        if self.device.type != "cuda":
            return [end - began for began, end in marks]
        torch.cuda.synchronize(self.device)
        return [began.elapsed_time(end) / 1000 for began, end in marks]

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
