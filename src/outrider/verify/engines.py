"""Takes the address of a serving engine and prompts in tokens, gives answers and its own counts of drafts; loads nothing.

Spelling of requests, answers and counters: vLLM 0.32, SGLang 0.5.23, llama.cpp's server of 2026.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.config import NO_LOGIN, without_login
from outrider.errors import UserError
from outrider.features.calls import call, call_json
from outrider.verify.sampling import DecodeOptions

TIMEOUT_S = 600.0  # of one answer: a long one on a slow machine takes minutes


@dataclass(frozen=True)
class ServerAnswer:
    """New tokens (the stop token included, if the engine gives it) and the wall of the request.

    `forwards` (of the target, after the prompt's own), `drafted` and `accepted` tokens, `accepted_by_slot` 1, 2, ..: where
    answers carry them, else 0 and none.
    """

    tokens: list[int]
    seconds: float
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_slot: tuple[int, ...] = ()


@dataclass(frozen=True)
class ServerCounts:
    """An engine's counters since it started, or a difference of two readings. `accepted_by_slot`: of slots 1, 2, .."""

    forwards: int
    drafted: int
    accepted: int
    accepted_by_slot: list[int]

    def __sub__(self, other: "ServerCounts") -> "ServerCounts":
        by_slot = [a - b for a, b in zip(self.accepted_by_slot, other.accepted_by_slot, strict=True)]
        return ServerCounts(self.forwards - other.forwards, self.drafted - other.drafted, self.accepted - other.accepted, by_slot)


class Engine(Protocol):
    """One server. `answer` raises UserError naming the address for whatever goes wrong there."""

    url: str

    def answer(self, prompt_ids: Sequence[int], options: DecodeOptions) -> ServerAnswer: ...

    def counters(self) -> ServerCounts | None:
        """The engine's counters now; None where each answer carries its own counts, or the server drafts nothing."""


def open_engine(name: str, url: str, *, drafts: bool) -> Engine:
    """The engine called `name` at `url`. `drafts`: it must say what it drafts. Raises UserError when it is none of ours."""
    if name not in ENGINES:
        raise UserError(f"--engine {name}: must be one of {', '.join(ENGINES)}")
    if not re.match(r"https?://[^/]", url):
        raise UserError(f"--base-url {without_login(url)}: must be the address of a server, such as http://127.0.0.1:8000")
    if without_login(url) != url:
        raise UserError(f"--base-url {without_login(url)}: {NO_LOGIN}")
    return ENGINES[name](url.rstrip("/").removesuffix("/v1"), drafts)


def take(answer: Any, path: str, kind: type, url: str) -> Any:
    """The value at `path` ("choices.0.token_ids") of a JSON answer. Raises UserError when it is missing or not of `kind`."""
    value = answer
    for key in path.split("."):
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{url}: the server's answer lacks '{path}': check that it is the engine that --engine names, with "
                            "speculative decoding on, and not older than the version that this reads") from error
    if type(value) is not kind:
        raise UserError(f"{url}: the server's answer has {path} = {str(value)[:80]}: must be of type {kind.__name__}")
    return value


def _whole_numbers(answer: Any, path: str, url: str, what: str) -> list[int]:
    found = take(answer, path, list, url)
    if not all(type(number) is int for number in found):
        raise UserError(f"{url}: the server's answer has {path} = {str(found)[:80]}: must be a list of {what}")
    return list(found)


def _token_ids(answer: Any, path: str, url: str) -> list[int]:
    return _whole_numbers(answer, path, url, "token ids")


@dataclass
class Vllm:
    """vLLM's OpenAI-compatible server: counters at /metrics, summed over its engines; they count accepted tokens past the end."""

    url: str
    drafts: bool

    def __post_init__(self) -> None:
        models = f"{self.url}/v1/models"
        self.model = take(call_json(models, None, timeout_s=TIMEOUT_S), "data.0.id", str, models)

    def answer(self, prompt_ids: Sequence[int], options: DecodeOptions) -> ServerAnswer:
        url = f"{self.url}/v1/completions"
        body = {"model": self.model, "prompt": list(prompt_ids), "max_tokens": options.max_new_tokens, "return_token_ids": True,
                "temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k, "seed": options.seed,
                "stop_token_ids": list(options.stop_ids)}
        began = time.perf_counter()
        found = call_json(url, body, timeout_s=TIMEOUT_S)
        return ServerAnswer(_token_ids(found, "choices.0.token_ids", url), time.perf_counter() - began)

    def counters(self) -> ServerCounts | None:
        if not self.drafts:
            return None
        url, prefix = f"{self.url}/metrics", "vllm:spec_decode_num_"
        found = read_prometheus(call(url, None, timeout_s=TIMEOUT_S))
        missing = [name for name in ("drafts", "draft_tokens", "accepted_tokens") if f"{prefix}{name}" not in found]
        if missing:
            raise UserError(f"{url}: has no counter {prefix}{missing[0]}: start the server with --speculative-config and "
                            "with its statistics on")
        drafts, drafted, accepted = (round(sum(found[f"{prefix}{name}"].values()))
                                     for name in ("drafts", "draft_tokens", "accepted_tokens"))
        by_slot: dict[int, int] = {}
        for labels, value in found.get(f"{prefix}accepted_tokens_per_pos", {}).items():
            slot = int(dict(labels).get("position", "0"))
            by_slot[slot] = by_slot.get(slot, 0) + round(value)
        return ServerCounts(drafts, drafted, accepted, [by_slot[slot] for slot in sorted(by_slot)])


@dataclass
class Sglang:
    """SGLang's own /generate, whose answers carry the request's counts."""

    url: str
    drafts: bool

    def answer(self, prompt_ids: Sequence[int], options: DecodeOptions) -> ServerAnswer:
        url = f"{self.url}/generate"
        sampling: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature,
                                    "top_p": options.top_p, "stop_token_ids": list(options.stop_ids)}
        if options.top_k:
            sampling["top_k"] = options.top_k
        began = time.perf_counter()
        found = call_json(url, {"input_ids": list(prompt_ids), "sampling_params": sampling}, timeout_s=TIMEOUT_S)
        seconds, tokens = time.perf_counter() - began, _token_ids(found, "output_ids", url)
        if not self.drafts:
            return ServerAnswer(tokens, seconds)
        forwards, drafted, accepted = (take(found, f"meta_info.{key}", int, url) for key in (
            "spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts"))
        histogram: list[int] = []  # forwards by how many tokens they accepted; releases before it give none
        if "spec_correct_drafts_histogram" in found["meta_info"]:
            histogram = _whole_numbers(found, "meta_info.spec_correct_drafts_histogram", url, "counts")
        by_slot = tuple(sum(histogram[slot:]) for slot in range(1, len(histogram)))
        return ServerAnswer(tokens, seconds, forwards, drafted, accepted, by_slot)

    def counters(self) -> None:
        return None


@dataclass
class LlamaCpp:
    """llama.cpp's own /completion, whose answers carry the request's counts; it ends a text at its own end tokens."""

    url: str
    drafts: bool

    def answer(self, prompt_ids: Sequence[int], options: DecodeOptions) -> ServerAnswer:
        url = f"{self.url}/completion"
        body = {"prompt": list(prompt_ids), "n_predict": options.max_new_tokens, "temperature": options.temperature,
                "top_p": options.top_p, "top_k": options.top_k, "seed": options.seed, "min_p": 0.0, "cache_prompt": False,
                "return_tokens": True, "samplers": ["top_k", "top_p", "temperature"]}
        began = time.perf_counter()
        found = call_json(url, body, timeout_s=TIMEOUT_S)
        seconds, tokens = time.perf_counter() - began, _token_ids(found, "tokens", url)
        if not self.drafts:
            return ServerAnswer(tokens, seconds)
        made = take(found, "timings.predicted_n", int, url)
        if made < 2:  # nothing to draft, and then it says nothing
            return ServerAnswer(tokens, seconds, 0, 0, 0)
        drafted, accepted = (take(found, f"timings.{key}", int, url) for key in ("draft_n", "draft_n_accepted"))
        return ServerAnswer(tokens, seconds, made - 1 - accepted, drafted, accepted)  # the first token came with the prompt

    def counters(self) -> None:
        return None


ENGINES: dict[str, Any] = {"vllm": Vllm, "sglang": Sglang, "llamacpp": LlamaCpp}
SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? +(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_prometheus(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples of the Prometheus text format: value by labels by name, the name without the `_total` of counters."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for line in text.splitlines():
        sample = SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample.groups()
        try:
            found.setdefault(name.removesuffix("_total"), {})[tuple(LABEL.findall(labels or ""))] = float(value)
        except ValueError:
            continue
    return found
