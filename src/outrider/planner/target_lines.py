"""Takes a job, gives the lines of the frozen target: its weights, the features it leaves, its forward; runs nothing."""

from collections.abc import Iterator

from outrider.planner import lines as at
from outrider.planner.job import Job
from outrider.planner.lines import Line, Role, line
from outrider.planner.target_shapes import LINEAR

CHECK_CONTEXT = 2048  # tokens of a held-out prompt and its answer, assumed for the acceptance check's caches


def capture_lines(job: Job, layers: range, *, colocated: bool) -> list[Line]:
    """The target's lines on a device that captures with these layers: with the first of them comes the embedding, and from any
    but the last one's device hidden states go on to the next."""
    lines = [*weight_lines(job, layers), *_forward(job, layers)]
    if not colocated:
        lines += _on_their_way(job, layers)
    return lines + (list(_check(job, layers)) if job.whole_target else [])


def ends_and_features(job: Job, *, colocated: bool) -> list[Line]:
    """The target's lines on the device that learns: its ends (embedding, head; the embedding only once where the target is on the
    same device) and the features."""
    return [*_ends(job, colocated=colocated), *_features(job)]


def weight_lines(job: Job, within: range) -> Iterator[Line]:
    """These layers' weights, the embedding with the first."""
    layers = job.target.layers[within.start : within.stop]
    matrices, other = sum(x.matrices for x in layers), sum(x.other for x in layers)
    embedding = {"V": job.target.vocab_size, "D": job.target.hidden_size}
    if within.start == 0:
        yield line("target: embedding", embedding, job.target_dtype, at.LOAD, at.LAST, role="capture")
    if job.fp8:
        rows = sum(x.out_features for x in layers)
        yield line("target: layers in FP8", {"elements": matrices}, "float8", at.LOAD, at.LAST, role="capture")
        yield line("target: row scales", {"rows": rows}, "float32", at.LOAD, at.LAST, role="capture")
    else:
        packed, bits = sum(x.packed for x in layers), job.target.bits
        if packed and bits:
            yield line(f"target: layers, {bits:.2f} bits a weight ({job.target.quantised})", {"bytes": int(packed * bits / 8)},
                       "uint8", at.LOAD, at.LAST, role="capture")
        if matrices > packed:
            yield line("target: layers", {"elements": matrices - packed}, job.target_dtype, at.LOAD, at.LAST, role="capture")
    yield line("target: norms, convolutions, routers", {"elements": other}, job.target_dtype, at.LOAD, at.LAST, role="capture")


def _ends(job: Job, *, colocated: bool) -> Iterator[Line]:
    ends = {"V": job.target.vocab_size, "D": job.target.hidden_size}
    if not job.target.tied or not colocated:
        yield line("target: head", ends, job.target_dtype, at.LOAD, at.LAST)
    if not job.target.tied and not colocated:
        yield line("target: embedding for the blocks", ends, job.target_dtype, at.LOAD, at.LAST)


def _features(job: Job) -> Iterator[Line]:
    one = {"S": job.context, "L D": len(job.drafter.target_layer_ids) * job.target.hidden_size}
    yield line("features", one, job.target_dtype, at.CAPTURE, at.UPDATE)
    if job.prefetch:
        yield line("features of the next rows", one, job.target_dtype, at.LOAD, at.LAST)
    elif job.micro_batches > 1:
        yield line("features of the rows before", one, job.target_dtype, at.CAPTURE, at.CAPTURE)


def _on_their_way(job: Job, within: range) -> Iterator[Line]:
    """What waits on a capture card: of as many rows as there are shares, and of one that is leaving."""
    D, here = job.target.hidden_size, sum(i in within for i in job.drafter.target_layer_ids)
    count = 1 + len(job.capture_ranges) if job.prefetch else 1
    goes_on = job.captured > within.stop and within[-1] not in job.drafter.target_layer_ids
    if here or goes_on:
        name = {"S": job.context, "L D": here * D} if not goes_on else {"S": job.context, f"{here + 1} D": (here + 1) * D}
        yield line("features on their way", name, job.target_dtype, at.LOAD, at.LAST, role="capture", count=count)
    if within.start:
        yield line("hidden states that came", {"S": job.context, "D": D}, job.target_dtype, at.LOAD, at.LAST, role="capture",
                   count=count)


def _forward(job: Job, within: range) -> Iterator[Line]:
    """The fullest moment of any captured layer over one group of documents, at most the whole row."""
    X, D, e = job.context, job.target.hidden_size, job.target_dtype
    layers = job.target.layers[within.start : min(within.stop, job.captured)]
    if not layers:  # all of them are for answers alone
        return
    last = at.LAST if job.prefetch else at.CAPTURE
    first = at.LOAD if job.prefetch else at.CAPTURE

    def working(what: str, width: int, dtype: str = e, count: int = 1) -> Line:
        return line(f"target forward: {what}", {"X": X, "width": width}, dtype, first, last, role="capture", count=count)

    yield working("stream and normed", D, count=3)
    mixer = max(layers, key=lambda layer: layer.mixer_width).mixer_width
    wide = 3 * max(layer.wide for layer in layers)
    if mixer > wide:
        kinds = {layer.kind for layer in layers}
        yield working("recurrence" if LINEAR in kinds else "attention", mixer)
    else:
        yield working("feed-forward", wide)
    if job.fp8:
        yield working("input in FP8", max(layer.wide for layer in layers), "float8")


def _check(job: Job, within: range) -> Iterator[Line]:
    """The acceptance check decodes one prompt at a time with the whole target."""
    d, T = job.drafter, CHECK_CONTEXT
    role: Role = "capture"
    caches = sum(layer.score_channels > 0 for layer in job.target.layers[within.start : within.stop])
    yield line("check: target's caches", {"T": T, "2 H C": 2 * max(x.score_channels for x in job.target.layers) or 1},
               job.target_dtype, at.CHECK, at.CHECK, role=role, count=max(caches, 1))
    yield line("check: prompt's hidden states", {"T": T, "D": d.hidden_size}, job.target_dtype, at.CHECK, at.CHECK, role=role,
               count=len(d.target_layer_ids) + 2)
