"""Takes what a log or a record states, gives its causes, likeliest first, each with the lines that show it; runs nothing.

A rule speaks only of what is stated: no rule guesses from a number that the message leaves out. The order of RULES is the order
of strength: what is no device memory at all, what other processes and the allocator did, then what the step asked for.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.planner.doctor.log import Evidence

GIB = 2**30
CONTEXT = 1.5 * GIB  # at most of a process outside its allocator: CUDA context, libraries
LEAST_FOREIGN = GIB  # of others, below which a desktop or a monitor is no cause
LEAST_SHARE = 0.08  # of a card lying reserved and unused: gaps of 5 to 10 % are usual
LEAST_STEPS = 5  # step lines with memory, to see a trend in them
BARE_ERRORS = (r"(?:CUDA|HIP)(?: driver)? error: out of memory", r"cudaErrorMemoryAllocation", r"CUDA_ERROR_OUT_OF_MEMORY")
NOT_STATED, NO_MEMORY, STOPPED = "not stated", "no out-of-memory", "stopped before unfused attention"


@dataclass(frozen=True)
class Cause:
    """`name`: of a kind. `sentence`: what happened, from what is stated alone. `shown_by`: numbers of the log's lines."""

    name: str
    sentence: str
    shown_by: tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """One of the questions that are always asked. `ok`: True no sign of it, False this it was, None not stated."""

    name: str
    ok: bool | None
    message: str


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB or not size else f"{size / 2**20:.2f} MiB"


def asked(log: Evidence) -> str:
    return "a request whose size is not stated" if log.requested is None else f"a request for {gib(log.requested)}"


def find_causes(log: Evidence) -> list[Cause]:
    """All causes that the log supports, the first the one to act on; never empty."""
    found = [cause for cause in (rule(log) for rule in RULES) if cause is not None]
    if log.error and not any(cause.name != NOT_STATED for cause in found):
        found.append(_rest(log))
    return found or [Cause(NO_MEMORY, "No out-of-memory is stated.", ())]


def look(log: Evidence, causes: Sequence[Cause]) -> list[Finding]:
    """Leak, fragmentation, dense fallback, another process, simply too large: each with what speaks for or against it."""
    too_large = None if causes[0].name in (NOT_STATED, NO_MEMORY) else "another cause comes first"
    answers = {**{name: answer(log) for name, answer in QUESTIONS.items()}, "too large": too_large}
    return [_finding(name, against, causes) for name, against in answers.items()]


def _finding(name: str, against: str | None, causes: Sequence[Cause]) -> Finding:
    said = next((cause.sentence for cause in causes if cause.name == name), None)
    if said is not None:
        return Finding(name, False, said)
    return Finding(name, None if against is None else True, against or "not stated")


def _no_leak(log: Evidence) -> str | None:
    if len(log.held) < LEAST_STEPS:
        return None
    sizes = [size for _, size in log.held]
    return f"{gib(min(sizes))} to {gib(max(sizes))} at the end of steps {log.held[0][0]} to {log.held[-1][0]}, no steady growth"


def _no_gaps(log: Evidence) -> str | None:
    return None if log.unallocated is None else f"only {gib(log.unallocated)} were reserved and unused"


def _nobody_else(log: Evidence) -> str | None:
    if log.others and log.requested is not None and log.free is not None and log.requested <= log.free:
        return f"others held {gib(sum(used for _, used in log.others))}, but {gib(log.free)} of the card were free"
    if log.others:
        return f"others held {gib(sum(used for _, used in log.others))}, too little to matter, or it is this process itself"
    if log.capacity is None or log.free is None or log.allocated is None:
        return None
    rest = log.capacity - log.free - log.allocated - (log.unallocated or 0)
    return f"all but {gib(max(rest, 0))} of what was used was this process's own" if rest < CONTEXT else None


def _fused(log: Evidence) -> str | None:
    return "no dense or eager attention among the frames" if log.frames else None


def _rest(log: Evidence) -> Cause:
    if log.requested is None or log.allocated is None or log.capacity is None:
        return Cause(NOT_STATED, "The device ran out of memory; what asked for it, or what held the rest, is not stated.",
                     (log.error,))
    most = log.capacity if log.allowed is None else min(log.allowed, log.capacity)
    where = f" in {log.frames[-1].function}" if log.frames else ""
    return Cause("too large", f"The job is larger than the card: {gib(log.allocated)} were allocated and {gib(log.requested)} "
                 f"more asked for{where}, of {gib(most)}.", (log.error,))


def _shared_memory(log: Evidence) -> Cause | None:
    line = log.find(r"out of resource: shared memory", r"No valid triton configs.*[Oo]ut of ?[Rr]esource",
                    r"out of resource: \S+ Required: \d+", r"OutOfResources:")
    sentence = ("A kernel's tiles do not fit the memory inside one multiprocessor (shared memory, 100 to 230 KiB): the card's "
                "own memory did not run out, and freeing some does not help.")
    return Cause("shared memory", sentence, (line,)) if line else None


def _stopped(log: Evidence) -> Cause | None:
    """Outrider's own tripwire (model.tripwire), which says shapes, bytes and the reason."""
    line = log.find(r"was about to run unfused on queries")
    if not line:
        return None
    told = re.sub(r"^.*?(?=flex_attention\w* was about)", "", log.lines[line - 1])
    return Cause(STOPPED, f"No memory ran out: the run was stopped before attention could run unfused; {told}.", (line,))


def _host(log: Evidence) -> Cause | None:
    shm = log.find(r"insufficient shared memory \(shm\)", r"workers are out of shared memory")
    if shm:
        return Cause("host memory", "The host's shared memory (/dev/shm), through which loader processes pass rows, ran out: not "
                     "the card's.", (shm,))
    killed = log.find(r"oom[-_]kill(?:er|:| event)", r"[Oo]ut of memory: Kill", r"OOM ?Killed\b", r"Memory cgroup out of memory",
                      r"node running low on memory", r"low memory! at or below", r"systemd-oomd.*[Kk]illed")
    if killed:
        return Cause("host memory", "The system killed a process because the host's memory ran out, not the card's.", (killed,))
    failed = log.find(r"DefaultCPUAllocator: (?:can't|not enough)", r"^(?:\S+: ?)?MemoryError\b", r"_ArrayMemoryError",
                      r"Cannot allocate memory", r"cudaHostAlloc.*out of memory")
    if failed:
        return Cause("host memory", "An allocation in the host's memory failed, not one on the card.", (failed,))
    pinned, bare = log.frame("pin_memory", code=r"\.pin_memory\(|pin_memory=True"), log.find(*BARE_ERRORS)
    if pinned is not None and bare and not log.error:
        return Cause("host memory", "Page-locked memory of the host was asked for and not had: CUDA says so in the words that it "
                     "has for the card's.", (pinned.number, bare))
    return None


def _nccl(log: Evidence) -> Cause | None:
    line = log.find(r"Failed to CUDA (?:calloc|malloc|host)", r"NCCL WARN .*out of memory",
                    r"^(?:\[rank\d+\]: )?Cuda failure (?:\d+ )?'out of memory'", r"ncclSystemError.*out of memory")
    return Cause("NCCL", "NCCL could not get memory for its own buffers, which it takes outside PyTorch's allocator: the "
                 "allocator had left too little of the card.", (line,)) if line and not log.error else None


def _another_process(log: Evidence) -> Cause | None:
    others = list(log.others)
    if log.mine is None and others and log.allocated is not None and log.unallocated is not None:
        # In a container the driver knows this process by another number: the one that holds what PyTorch has reserved is itself
        reserved = log.allocated + log.unallocated
        own = [item for item in others if -0.02 * reserved <= item[1] - reserved <= max(CONTEXT, 0.1 * reserved)]
        others = [item for item in others if item not in sorted(own, key=lambda item: abs(item[1] - reserved))[:1]]
    size = sum(used for _, used in others)
    if log.requested is None or log.free is None or size < LEAST_FOREIGN or log.free + size < log.requested:
        return None
    if log.requested <= log.free:  # the card had it: a limit of this process's own refused
        return None
    who = " and ".join(f"process {pid} ({gib(used)})" for pid, used in others)
    more = f"; of {gib(log.capacity)} this one could not have that part" if log.capacity else ""
    return Cause("another process", f"Others are on the card: {who} held {gib(size)} of it when {gib(log.requested)} were asked "
                 f"for{more}.", (log.error,))


def _taken_before(log: Evidence) -> Cause | None:
    """Who had the card before this run asked for any of it: as an engine says at its start, or nvidia-smi earlier in the log."""
    start = log.find(r"Free memory on device .* on startup is less than desired")
    told = re.search(r"\(([\d.]+)/([\d.]+ GiB)\)", log.lines[start - 1]) if start else None
    if told:
        return Cause("another process", f"Before anything was loaded only {told[1]} of {told[2]} were free: others hold the rest "
                     "of the card.", (start,))
    failed = log.find(*BARE_ERRORS)
    first = log.find(r"Traceback \(most recent call last\)")
    large = [item for item in log.listed if item.used_bytes >= LEAST_FOREIGN and item.number < first]
    if log.error or not failed or not large:
        return None
    who = " and ".join(f"process {item.pid} ({item.name}, {gib(item.used_bytes)})" for item in large)
    return Cause("another process", f"Others are on the card: nvidia-smi, earlier in the log, lists {who}.",
                 (*(item.number for item in large), failed))


def _private_pools(log: Evidence) -> Cause | None:
    if not log.pools or not log.capacity or log.pools < max(log.requested or 0, 0.1 * log.capacity):
        return None
    return Cause("private pools", f"{gib(log.pools)} stand in private pools (CUDA graphs), which no other allocation may use.",
                 (log.error,))


def _fragmentation(log: Evidence) -> Cause | None:
    if log.unallocated is None or log.requested is None or log.capacity is None or log.unallocated < log.requested:
        return None
    if log.unallocated < LEAST_SHARE * log.capacity and log.requested < 0.01 * log.capacity:
        return None
    return Cause("fragmentation", f"The allocator had {gib(log.unallocated)} reserved and unused, in pieces none of which could "
                 f"take {gib(log.requested)}: the card is fragmented rather than full.", (log.error,))


def _leak(log: Evidence) -> Cause | None:
    if not log.error or len(log.held) < LEAST_STEPS:
        return None
    sizes = [size for _, size in log.held]
    grown, changes = sizes[-1] - sizes[0], [b - a for a, b in pairwise(sizes)]
    late = changes[len(changes) // 2:]  # growth while caches and optimizer state come about ends by then
    if grown < 0.05 * sizes[0] or sum(change > 0 for change in changes) < 0.8 * len(changes) or sum(late) < 0.25 * grown:
        return None
    (first, _), (last, _) = log.held[0], log.held[-1]
    return Cause("leak", f"Memory grew from {gib(sizes[0])} at step {first} to {gib(sizes[-1])} at step {last}, "
                 f"{grown / max(last - first, 1) / 2**20:.1f} MiB a step: something is kept from step to step.", (log.error,))


def _attention(log: Evidence) -> Cause | None:
    dense = log.frame("sdpa_dense", "sdpa_dense_backward", "math_attention", "_math_attention_inner")
    eager = log.frame("eager_attention_forward", "repeat_kv", code=(
        r"softmax\(\s*(?:attn|attention)?_?(?:weights|scores)|matmul\(q\w*, ?k\w*|(?:baddbmm|einsum)\(.*key|\bq\w* @ k\w*"))
    frame = dense or eager
    if not log.error or frame is None:
        return None
    limit = log.find(r"hit config\.(?:recompile|cache_size)_limit", r"without torch\.compile")
    why = " after torch.compile gave up (recompile limit)" if limit and dense else ""
    whose = "flex_attention ran outside the compiler" + why if dense else "eager attention ran"
    return Cause("unfused attention", f"Attention ran unfused: {whose} and {frame.function} keeps whole score matrices, "
                 f"{asked(log)} failed there.", tuple(filter(None, (limit if dense else 0, frame.number, log.error))))


def _from_frame(name: str, sentence: str, *functions: str, code: str = "", file: str = "") -> Callable[[Evidence], Cause | None]:
    """A rule of one kind of frame on the stack of a device's out-of-memory."""
    def rule(log: Evidence) -> Cause | None:
        frame = log.frame(*functions, code=code, file=file) if log.error else None
        return None if frame is None else Cause(name, sentence.format(asked=asked(log), where=frame.function),
                                                (frame.number, log.error))
    return rule


def _no_cause(log: Evidence) -> Cause | None:
    if log.error:
        return None
    for patterns, what in (
        (BARE_ERRORS, "The device ran out of memory; what asked for it, and how much, is not stated."),
        ((r"CU(?:BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED",),
         "A library could not get memory for its workspace; what holds the card is not stated."),
        ((r"exit ?code:? -9", r"^(?!.*potential).*SIGKILL", r"^Killed$", r"signal 9", r"killed by signal: Killed"),
         "A process was killed by signal 9; by whom, and whether memory was the reason, is not stated."),
        ((r"No executable batch size found",),
         "No batch size was small enough for the device; what fills it is not stated, the errors themselves were swallowed."),
        ((r"\b[Oo]ut of memory\b", r"OutOfMemory", r"OOM killer", r"RESOURCE_EXHAUSTED"),
         "An out-of-memory is spoken of, in words that name no cause known here."),
    ):
        line = log.find(*patterns)
        if line:
            return Cause(NOT_STATED, what, (line,))
    return None


QUESTIONS: dict[str, Callable[[Evidence], str | None]] = {
    "leak": _no_leak, "fragmentation": _no_gaps, "unfused attention": _fused, "another process": _nobody_else,
}

RULES: tuple[Callable[[Evidence], Cause | None], ...] = (
    _stopped, _shared_memory, _nccl, _another_process, _taken_before, _private_pools, _fragmentation, _leak, _attention,
    _from_frame("block mask", "The block mask was made eagerly, as a table of every query and key: {asked} failed in {where}.",
                "create_mask", "create_block_mask"),
    _from_frame("logits", "Logits over the whole vocabulary filled the card: {asked} failed in {where}.",
                "cross_entropy", "log_softmax", "ForCausalLMLoss",
                code=r"logits\.float\(\)|lm_head\(|\boutput\(.*\.float\(\)|log_softmax\(|cross_entropy\("),
    _from_frame("logits", "A model's outputs were being made fp32, of which logits over the whole vocabulary are the largest: "
                "{asked} failed in {where}.", "_convert_to_fp32"),
    _from_frame("optimizer birth", "The optimizer's state was being born, in its first step, when {asked} failed ({where}): it "
                "stays for the whole run.", "_init_group", "init_state", "get_state_buffer", "initialize_optimizer_states",
                "_new_buffer", code=r"state\[[^\]]+\] = .*(?:zeros|empty|clone|full)"),
    _from_frame("gradient birth", "Gradients of the weights were being born when {asked} failed ({where}).",
                "give_gradients", "accumulate_unsharded_grad_if_needed", "unsharded_accumulated_grad", "_ddp_init_helper",
                "foreach_reduce",
                code=r"\.(?:main_)?grad = "),
    _from_frame("checkpoint load", "A checkpoint was being loaded onto the card, beside what stands there: {asked} failed "
                "in {where}.", "_cuda_deserialize", "restore_location", "_process_value_according_to_param_policy",
                "load_state_dict",
                file=r"torch/serialization\.py$"),
    _from_frame("weights", "Weights were being loaded onto the card: {asked} failed in {where}.",
                "from_pretrained", "_load_pretrained_model", "_materialize_copy", "set_module_tensor_to_device",
                code=r"return t\.to\($|\.cuda\(\)$"),
    _from_frame("target's forward",
                "A forward without gradients, as a frozen target's is, filled the card: {asked} failed below {where}.",
                code=r"no_grad|inference_mode", file=r"_contextlib\.py$"),
    _host, _no_cause,
)
