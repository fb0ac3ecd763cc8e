"""Takes a run that is being traced, gives its trace file once enough steps are in it; knows nothing of what the work is."""

import torch

from outrider.planner.timeline import TRACE_NAME, TraceFile, by_process, write_trace
from outrider.progress import say
from outrider.records import Span
from outrider.train.start import Run


def keep_trace(run: Run) -> None:
    """After each step: once `train.trace_steps` are traced, write what all processes did and trace no more. Every process must
    call it. Clocks of several machines are taken to agree."""
    trace, settings = run.relay.trace, run.resolved.config.train
    if trace is None or not trace.on:
        return
    run.traced += 1
    if run.traced < settings.trace_steps and run.position.step < run.steps:
        return
    trace.on = False
    everyones = run.processes.gather((trace.began, trace.spans()))
    first = min(began for began, _ in everyones)
    spans = {rank: [Span(s.lane, s.label, s.begin + 1e3 * (began - first), s.end + 1e3 * (began - first)) for s in mine]
             for rank, (began, mine) in enumerate(everyones)}
    if run.processes.leads:
        device = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else run.device.type
        found = TraceFile(device, run.traced, run.processes.count, -(-settings.accumulation // run.processes.count),
                          by_process(spans))
        write_trace(run.folder / TRACE_NAME, found)
        say(f"{run.folder / TRACE_NAME}: what ran when in {run.traced} steps; outrider report draws it")
