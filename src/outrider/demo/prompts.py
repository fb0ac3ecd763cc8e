"""Takes a seed and a count, gives prompts of four kinds, all different; knows nothing of targets or files."""

import random
from collections.abc import Callable

NAMES = ("Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ivy", "Jack", "Kate", "Leo", "Mia",
         "Noah", "Olga", "Paul")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "stickers", "oranges", "stamps", "cards", "shells", "buttons", "eggs")
TOPICS = ("fruits", "animals", "countries in Europe", "colors", "musical instruments", "vegetables", "sports", "tools", "planets",
          "kitchen items", "clothes", "trees", "birds", "kinds of weather", "school subjects", "flowers", "jobs", "big cities")
ANIMALS = ("fox", "rabbit", "turtle", "owl", "bear", "mouse", "duck", "cat", "dog", "hedgehog", "squirrel", "frog")
PLACES = ("forest", "village", "mountain", "river", "garden", "castle", "island", "farm", "desert", "lighthouse")
FINDINGS = ("a golden key", "an old map", "a lost letter", "a shiny stone", "a small boat", "a broken clock", "a red kite",
            "a magic lamp")
TASKS = (
    ("adds {n} to a number", "add_{n}"), ("multiplies a number by {n}", "times_{n}"),
    ("subtracts {n} from a number", "minus_{n}"),
    ("checks if a number is greater than {n}", "is_greater_than_{n}"),
    ("checks if a number is divisible by {n}", "divisible_by_{n}"),
    ("returns the first {n} items of a list", "first_{n}"), ("returns the last {n} items of a list", "last_{n}"),
    ("repeats a string {n} times", "repeat_{n}"), ("raises a number to the power of {n}", "power_{n}"),
)


def arithmetic(draw: random.Random) -> str:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    a, b = draw.randint(3, 40), draw.randint(2, 30)
    if draw.random() < 0.5:
        return f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?"
    return f"{name} has {a + b} {thing} and gives away {b}. How many {thing} does {name} have left?"


def code(draw: random.Random) -> str:
    task, name = draw.choice(TASKS)
    n = draw.randint(2, 30)
    return f"Write a Python function {name.format(n=n)} that {task.format(n=n)}."


def listing(draw: random.Random) -> str:
    return f"{draw.choice(('List', 'Name'))} {draw.randint(4, 9)} {draw.choice(TOPICS)}, one per line."


def story(draw: random.Random) -> str:
    return (f"Write a very short story about a {draw.choice(ANIMALS)} named {draw.choice(NAMES)} who finds "
            f"{draw.choice(FINDINGS)} near the {draw.choice(PLACES)}.")


KINDS: dict[str, Callable[[random.Random], str]] = {"arithmetic": arithmetic, "code": code, "list": listing, "story": story}


def make_prompts(count: int, *, seed: int, exclude: set[str]) -> list[dict[str, str]]:
    """`count` prompts, the kinds in turn, none twice and none of `exclude`; the same for the same seed."""
    draw = random.Random(seed)
    seen = set(exclude)
    prompts: list[dict[str, str]] = []
    kinds = list(KINDS)
    for _ in range(100 * count):
        if len(prompts) == count:
            return prompts
        kind = kinds[len(prompts) % len(kinds)]
        prompt = KINDS[kind](draw)
        if prompt not in seen:
            seen.add(prompt)
            prompts.append({"id": f"{kind}-{len(prompts)}", "kind": kind, "prompt": prompt})
    raise AssertionError(f"the generators have fewer than {count} different prompts")
