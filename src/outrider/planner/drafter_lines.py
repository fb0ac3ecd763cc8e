"""Takes a job, gives the lines of the drafter's step: weights, what each layer keeps, loss, gradients, optimizer; runs nothing.

Three ways through the drafter. "fused": train.roads.FusedRoad, compiled. "dense": train.roads.DenseRoad, operator by operator
in autocast. "unfused": the fused drafter operator by operator with whole score matrices, what any trainer gets whose
flex_attention does not reach the compiler; Outrider's tripwire stops it, other trainers run it. What a road keeps is written
here as its code keeps it; bench/ledger.py holds the bytes against a GPU's.
"""

from collections.abc import Iterator
from dataclasses import replace

from outrider.model.flops import PEAK_OVER_SCORES
from outrider.model.span_tiles import TILES
from outrider.planner import lines as at
from outrider.planner.job import Job
from outrider.planner.lines import Line, line

TILE = 128


def drafter_lines(job: Job) -> list[Line]:
    """Everything that the learning device holds but for the target and its features."""
    lines = [*_weights(job), *_layout(job), *_context(job), *_loss(job), *_gradients(job)]
    for i in range(job.drafter.num_layers):
        lines += [*_kept_by_layer(job, i), *_working_in_layer(job, i)]
    return lines


def _weights(job: Job) -> Iterator[Line]:
    share = job.shard(job.parameters)
    yield line("drafter: masters", {job.shard_name: share}, "float32", at.LOAD, at.LAST)
    if job.eight_bit:
        yield line("optimizer: moments, 8 bit", {job.shard_name: share}, "uint8", at.LOAD, at.LAST, count=2)
        yield line("optimizer: scales of the moments", {f"{job.shard_name} / 256": -(-share // 256)}, "float32", at.LOAD, at.LAST,
                   count=2)
    else:
        yield line("optimizer: both moments", {job.shard_name: share}, "float32", at.LOAD, at.LAST, count=2)
    if job.road != "dense" and job.sharded:
        yield line("drafter: compute copy", {"P": job.parameters}, job.compute, at.LOAD, at.LAST)
    if job.lends:  # one packed matrix at a time, when they are lent and when they come back
        d = job.drafter
        largest = d.hidden_size * max(2 * d.intermediate_size, len(d.target_layer_ids) * d.hidden_size)
        for phase in (at.LAYOUT, at.BACK_CONTEXT):
            yield line("masters: room to rearrange one matrix", {"elements": largest}, "float32", phase, phase)


def _layout(job: Job) -> Iterator[Line]:
    d, Q, S, N = job.drafter, job.queries, job.context, job.keys
    kinds = len(set(d.layer_types))
    end = at.forward(d.num_layers - 1)  # operator by operator, autograd keeps rounded copies of its own
    last = at.BACK_CONTEXT if job.road == "fused" else end
    yield line("rows and blocks", {"Q + S": Q + S, "tables": 5}, "int64", at.LAYOUT, at.UPDATE)
    if job.road == "dense":
        yield line("dense mask", {"B": job.rows, "Q": Q // job.rows, "N": N // job.rows}, "bool", at.LAYOUT, end, count=kinds)
        yield line("dense mask: comparisons", {"B": job.rows, "Q": Q // job.rows, "N": N // job.rows}, "bool", at.LAYOUT,
                   at.LAYOUT, count=3)
    elif job.eager_mask:
        # create_block_mask: the table as bool, its tiles and sums over them, 10 B a pair (1,280 MiB at 8192 x 16384, measured)
        yield line("block mask made eagerly", {"Q": Q // job.rows, "N": N // job.rows, "tables": 10}, "bool", at.LAYOUT,
                   at.LAYOUT)
    else:
        tiles = -(-(N // job.rows) // TILE)
        yield line("block mask: tiles", {"Q": Q, "N / 128": tiles, "tables": 10}, "bool", at.LAYOUT, at.LAYOUT)
    yield line("rotary tables", {"Q + S": Q + S, "C": d.head_dim, "cos, sin": 2}, "float32", at.CONTEXT, last)


def _context(job: Job) -> Iterator[Line]:
    d, S = job.drafter, job.context
    D, F = d.hidden_size, len(d.target_layer_ids) * d.hidden_size
    kv = 2 * d.num_kv_heads * d.head_dim
    if job.autocasts:
        yield line("context: rounded weight", {"D": D, "F": F}, job.compute, at.CONTEXT, at.forward(d.num_layers - 1))
    if job.target_dtype != job.compute:
        yield line("features in the compute dtype", {"S": S, "F": F}, job.compute, at.CONTEXT, at.BACK_CONTEXT)
    yield line("context: projected features", {"S": S, "D": D}, job.compute, at.CONTEXT, at.BACK_CONTEXT)
    if job.road == "fused":
        yield line("context: keys and values, all layers", {"S": S, "2 G C n": kv * d.num_layers}, job.compute, at.CONTEXT,
                   at.BACK_CONTEXT)
        yield line("context: weights side by side", {"D": D, "2 G C n": kv * d.num_layers}, job.compute, at.CONTEXT,
                   at.BACK_CONTEXT)
    else:
        yield line("context: norm in fp32", {"S": S, "D": D}, "float32", at.CONTEXT, at.BACK_CONTEXT)
        yield line("context: normed", {"S": S, "D": D}, job.compute, at.CONTEXT, at.BACK_CONTEXT)
    yield line("context: gradients", {"S": S, "D": D}, job.compute, at.BACK_CONTEXT, at.BACK_CONTEXT, count=2)


def _kept_by_layer(job: Job, i: int) -> Iterator[Line]:
    """What layer i keeps from its forward for its backward."""
    d = job.drafter
    D, HC, GC = d.hidden_size, d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    Q, S, N, e = job.queries, job.context, job.keys, job.compute
    last_rows = job.predicted if i + 1 == d.num_layers and job.road != "dense" else Q
    name = "Y" if last_rows != Q else "Q"

    def attention(what: str, shape: dict[str, int], dtype: str, count: int = 1) -> Line:
        return line(f"layer: {what}", shape, dtype, at.forward(i), at.back_attention(i), count=count)

    def feed_forward(what: str, shape: dict[str, int], dtype: str, count: int = 1) -> Line:
        return line(f"layer: {what}", shape, dtype, at.forward(i), at.back_feed_forward(i), count=count)

    yield attention("attended values", {"Q": Q, "H C": HC}, e)
    yield attention("log of softmax sums", {"H": d.num_heads, "Q": Q}, "float32")
    if job.road == "fused":
        if i > 0:
            yield attention("input", {"Q": Q, "D": D}, e)
        yield attention("projections of queries, keys, values", {"Q": Q, "(H + 2 G) C": HC + 2 * GC}, e)
        if job.keeps_attention:
            yield attention("turned queries", {"Q": Q, "H C": HC}, e)
            yield attention("turned keys, values", {"N": N, "G C": GC}, e, 2)
        yield feed_forward("after attention", {name: last_rows, "D": D}, e)
        if job.keeps_feed_forward:
            yield feed_forward("gate and up", {name: last_rows, "2 I": 2 * d.intermediate_size}, e)
        return
    yield attention("queries", {"Q": Q, "H C": HC}, e)
    yield attention("keys, values", {"N": N, "G C": GC}, e, 2)
    yield feed_forward("attended values, by slot", {name: last_rows, "H C": HC}, e)
    if job.road == "dense":  # scaled_dot_product_attention turns the table into numbers to add
        yield attention("mask as numbers", {"B": job.rows, "Q": Q // job.rows, "N": N // job.rows}, e)
    if job.compute == "float32":  # no fused kernel takes grouped heads and a mask in fp32: whole shares of each query are kept
        scores = {"B H": job.rows * d.num_heads, "Q": Q // job.rows, "N": N // job.rows}
        yield attention("attention shares", scores, e)
        for phase, count in ((at.forward(i), 2), (at.back_attention(i), 3)):
            yield line("attention: score matrices", scores, e, phase, phase, count=count)
    if job.autocasts:  # a rounded weight lives in autocast's cache through the forward, and in what its product saved
        yield attention("rounded weights of the attention", {"2 (H + G) C": 2 * (HC + GC), "D": D}, e)
        yield feed_forward("rounded weights of the feed-forward", {"3 I": 3 * d.intermediate_size, "D": D}, e)
    yield attention("norm of the input: fp32, normed, scaled", {"Q": Q, "D": D}, "float32")
    yield attention("norm of the input", {"Q": Q, "D": D}, e, 2)
    yield attention("norm of queries in fp32", {"Q": Q, "H C": HC}, "float32")
    yield attention("norm of queries", {"Q": Q, "H C": HC}, e)
    yield attention("norm of keys in fp32", {"N": N, "G C": GC}, "float32")
    yield attention("norm of keys", {"N": N, "G C": GC}, e)
    yield attention("rotary tables, rounded", {"2 Q + S": 2 * Q + S, "C": d.head_dim}, e, 2)
    yield feed_forward("norm after attention in fp32", {name: last_rows, "D": D}, "float32")
    yield feed_forward("norm after attention", {name: last_rows, "D": D}, e, 2)
    yield feed_forward("gate, up, silu, product", {name: last_rows, "I": d.intermediate_size}, e, 4)


def _working_in_layer(job: Job, i: int) -> Iterator[Line]:
    """What lives inside one phase of layer i: gradients of its activations, and the scores of an unfused attention."""
    d = job.drafter
    D, I, HC, GC = d.hidden_size, d.intermediate_size, d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    Q, S, N, e = job.queries, job.context, job.keys, job.compute
    yield line("stream", {"Q": Q, "D": D}, e, at.forward(i), at.forward(i), count=2)
    yield line("gradient of the stream", {"Q": Q, "D": D}, e, at.back_feed_forward(i), at.back_attention(i), count=2)
    if job.road != "fused":
        yield line("norm: working copies", {"Q": Q, "D": D}, "float32", at.forward(i), at.forward(i), count=2)
        yield line("norm: gradients in fp32", {"Q": Q, "D": D}, "float32", at.back_attention(i), at.back_attention(i), count=3)
    if job.autocasts:
        yield line("gradient of one weight, rounded", {"I": I, "D": D}, e, at.back_feed_forward(i), at.back_feed_forward(i))
    wide = 4 if job.road == "fused" else 2  # the product made again, its gradient, and those of gate and up
    wide += 0 if job.road != "fused" or job.keeps_feed_forward else 2
    yield line("gradients in the feed-forward", {"Q": Q, f"{wide} I": wide * I}, e, at.back_feed_forward(i),
               at.back_feed_forward(i))
    yield line("gradients of queries, attended", {"Q": Q, "H C": HC}, e, at.back_attention(i), at.back_attention(i), count=2)
    yield line("gradients of keys, values", {"N": N, "G C": GC}, e, at.back_attention(i), at.back_attention(i), count=2)
    if job.road == "fused" and job.compute == "bfloat16" and d.head_dim in TILES:  # only on GPUs where our own kernels run
        yield line("gradient of queries, summed", {"Q": Q, "H C": HC}, "float32", at.back_attention(i), at.back_attention(i))
    yield line("gradient of the context's keys, values", {"S": S, "2 G C": 2 * GC}, e, at.back_attention(i), at.BACK_CONTEXT)
    if job.road == "unfused":
        scores = {"B H": job.rows * d.num_heads, "Q": Q // job.rows, "N": N // job.rows}
        for name, phase in (("flex_attention", at.forward(i)), ("flex_attention_backward", at.back_attention(i))):
            one = line("attention: score matrices", scores, "float32", phase, phase)
            yield replace(one, count=PEAK_OVER_SCORES[name])


def _loss(job: Job) -> Iterator[Line]:
    d = job.drafter
    D, V, Y = d.hidden_size, d.vocab_size, job.predicted
    head = job.target_dtype
    rows, final = (job.queries, "Q") if job.road == "dense" else (Y, "Y")
    end = at.forward(d.num_layers - 1)
    yield line("final norm: input", {final: rows, "D": D}, job.compute if job.road == "fused" else "float32", end, at.BACK_LOSS)
    if job.road != "fused":
        yield line("final norm: normed", {final: rows, "D": D}, job.compute, end, at.BACK_LOSS)
        yield line("final norm: gradients in fp32", {final: rows, "D": D}, "float32", at.BACK_LOSS, at.BACK_LOSS, count=3)
    yield line("hidden states", {"Q": job.queries, "D": D}, job.compute, at.forward(d.num_layers - 1), at.LOSS)
    yield line("hidden states, by slot", {"Y": Y, "D": D}, job.compute, at.LOSS, at.LOSS)
    if job.plain_logits:
        yield line("logits: rounded", {"Y": Y, "V": V}, head, at.LOSS, at.LOSS)
        yield line("logits: fp32", {"Y": Y, "V": V}, "float32", at.LOSS, at.LOSS)
        yield line("logits: log-softmax", {"Y": Y, "V": V}, "float32", at.LOSS, at.BACK_LOSS)
        yield line("logits: gradients", {"Y": Y, "V": V}, "float32", at.BACK_LOSS, at.BACK_LOSS, count=2)
    else:
        yield line("loss: logits of one chunk", {"R": job.loss_rows, "V": V}, head, at.LOSS, at.LOSS)
        yield line("loss: gradient of one chunk", {"R": job.loss_rows, "D": D}, head, at.LOSS, at.LOSS)
        yield line("loss: gradient of the hidden states", {"Y": Y, "D": D}, job.compute, at.LOSS, at.BACK_LOSS)
    yield line("gradient of the hidden states", {"Y": Y, "D": D}, job.compute, at.BACK_LOSS, at.BACK_LOSS)
    yield line("gradient of the hidden states, all slots", {"Q": job.queries, "D": D}, job.compute, at.BACK_LOSS, at.BACK_LOSS)


def _gradients(job: Job) -> Iterator[Line]:
    """Gradients of the weights, born layer by layer in the backward."""
    d = job.drafter
    D, HC, GC = d.hidden_size, d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    born_late = job.road != "dense"  # the masters' own gradients are made from the compute weights' at the end
    dtype, last = (job.compute, at.BACK_CONTEXT) if born_late else ("float32", at.UPDATE)
    standing = job.micro_batches > 1  # from the second micro-batch on
    if born_late or standing:
        yield line("gradients of the masters", {job.shard_name: job.shard(job.parameters)}, "float32",
                   at.CONTEXT if standing else at.COLLECT, at.UPDATE)
    if born_late:
        yield line("gradient not collected yet", {"2 I": 2 * d.intermediate_size, "D": D}, dtype, at.COLLECT, at.COLLECT)
    if not born_late and standing:
        return
    for i in range(d.num_layers):
        after = at.back_feed_forward(i - 1) if i else at.BACK_CONTEXT
        yield line("gradients: down", {"I": d.intermediate_size, "D": D}, dtype, at.back_feed_forward(i), last)
        yield line("gradients: gate, up", {"2 I": 2 * d.intermediate_size, "D": D}, dtype, at.back_attention(i), last)
        yield line("gradients: output", {"H C": HC, "D": D}, dtype, at.back_attention(i), last)
        yield line("gradients: queries, keys, values", {"(H + 2 G) C": HC + 2 * GC, "D": D}, dtype, after, last)
    yield line("gradients: features' projection", {"D": D, "F": len(d.target_layer_ids) * D}, dtype, at.BACK_CONTEXT, last)
