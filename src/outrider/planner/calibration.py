"""Takes a device and the size of a run's products, gives the rates that it keeps up, and keeps them in a file; plans nothing.

A card at its power limit is slower than its datasheet, and than its own first second (an H200: 989 TFLOP/s stated, 769 cool, 685
kept up for 10 s), so each rate is that of the second half of some seconds of the same work, on random numbers: zeros take less
power.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.errors import UserError
from outrider.features.eight_bit import LEAST_CAPABILITY
from outrider.features.fp8 import quantise_rows, scaled_product
from outrider.files import read_json, write_json
from outrider.planner.gpus import CATALOGUE, Gpu, catalogue_name
from outrider.planner.speed import KEPT_UP, KEPT_UP_BANDWIDTH, KEPT_UP_FP8, LINK_SHARE
from outrider.progress import ProgressBar

SECONDS = {"bf16": 8.0, "fp8": 6.0, "bandwidth": 2.0, "link": 2.0}  # with what comes before and after less than 30
LEAST_S = 0.05  # of work launched at once, so that waiting for it does not count
LEAST_LINK = min(gpu.link for gpu in CATALOGUE.values())


@dataclass(frozen=True)
class Rates:
    """What a card keeps up: `bf16` and `fp8` (None: it has no such units) in operations/s, `bandwidth` of its memory and `link`
    to the next card (None: there is none) in bytes/s. `product`: rows, inner size and columns of the products; `seconds`: what
    all of it took.
    """

    card: str
    usable_bytes: int
    bf16: float
    fp8: float | None
    bandwidth: float
    link: float | None
    product: tuple[int, int, int]
    seconds: float
    torch: str

    @property
    def text(self) -> str:
        fp8 = f", {self.fp8 / 1e12:,.0f} in FP8" if self.fp8 else ""
        link = f", {self.link / 1e9:,.0f} GB/s to the next card" if self.link else ""
        return f"{self.bf16 / 1e12:,.0f} TFLOP/s in bf16{fp8}, memory {self.bandwidth / 1e9:,.0f} GB/s{link}"


def measure(device: torch.device, product: tuple[int, int, int], *, shares: float = 1.0, memory: int = 2**30) -> Rates:
    """The rates of `device`, in `shares` of the usual time: products `[X, D] [D, F]` and back, three arrays of `memory` bytes."""
    began = time.perf_counter()
    cuda, index = device.type == "cuda", device.index or 0
    works: dict[str, Callable[[], Work]] = {"bf16": lambda: _products(device, *product)}
    if not cuda or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY:
        works["fp8"] = lambda: _eight_bit_products(device, *product)
    works["bandwidth"] = lambda: _additions(device, memory)
    if cuda and torch.cuda.device_count() > index + 1:
        works["link"] = lambda: _copies(device, torch.device("cuda", index + 1), memory)
    found: dict[str, float] = {}
    with ProgressBar("calibrate", total=round(sum(SECONDS[name] for name in works)), unit="s") as bar:
        for name, make in works.items():
            work, size = make()
            found[name] = size / steady_s(work, seconds=SECONDS[name] * shares, device=device)
            bar.advance(round(SECONDS[name]), note=name)
    properties: Any = torch.cuda.get_device_properties(device) if cuda else None
    return Rates(
        card=catalogue_name(properties.name) if cuda else "cpu", usable_bytes=properties.total_memory if cuda else 0,
        bf16=found["bf16"], fp8=found.get("fp8"), bandwidth=found["bandwidth"], link=found.get("link"), product=product,
        seconds=round(time.perf_counter() - began, 1), torch=torch.__version__,
    )


Work = tuple[Callable[[], Any], float]  # what to do again and again, and how many operations or bytes it is


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _products(device: torch.device, X: int, D: int, F: int) -> Work:
    x_XD, up_DF, down_FD = _random(device, X, D), _random(device, D, F) / D**0.5, _random(device, F, D) / F**0.5
    return lambda: x_XD @ up_DF @ down_FD, 4.0 * X * D * F


def _eight_bit_products(device: torch.device, X: int, D: int, F: int) -> Work:
    x, up_FD = quantise_rows(_random(device, X, D)), quantise_rows(_random(device, F, D))
    return lambda: scaled_product(*x, *up_FD, None, torch.bfloat16), 2.0 * X * D * F


def _additions(device: torch.device, memory: int) -> Work:
    a, b, c = (torch.randn(memory // 4, device=device) for _ in range(3))
    return lambda: torch.add(a, b, out=c), 3.0 * memory


def _copies(device: torch.device, other: torch.device, memory: int) -> Work:
    here, there = (torch.empty(memory // 4, dtype=torch.uint8, device=place) for place in (device, other))
    return lambda: there.copy_(here, non_blocking=True), memory / 4


def steady_s(work: Callable[[], Any], *, seconds: float, device: torch.device) -> float:
    """Seconds of one call of `work`, done for so many seconds: the median of the second half."""
    times: list[tuple[float, float]] = []
    calls, began = 1, time.perf_counter()
    while not times or times[-1][0] < seconds:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        times.append((now - began, (now - start) / calls))
        calls *= 2 if now - start < LEAST_S else 1
    return statistics.median(took for at, took in times if at >= times[-1][0] / 2)


def as_gpu(rates: Rates) -> Gpu:
    """The card as it would state itself if it kept up of its word what an H200 does; what was not measured is the catalogue's."""
    known = CATALOGUE.get(rates.card)
    link = rates.link / LINK_SHARE if rates.link else known.link if known else LEAST_LINK
    return Gpu(rates.card, rates.usable_bytes, rates.bf16 / KEPT_UP, rates.fp8 / KEPT_UP_FP8 if rates.fp8 else None,
               rates.bandwidth / KEPT_UP_BANDWIDTH, link, measured=True)


def write_rates(path: Path, rates: Rates) -> None:
    write_json(path, asdict(rates))


def read_rates(path: Path) -> Rates:
    """What `write_rates` kept. Raises UserError where the file is missing, or no such file."""
    values: Any = read_json(path, what="the file of measured rates", way_out="make it with outrider plan --calibrate")
    try:
        product = tuple(int(size) for size in values["product"])
        rates = Rates(**{**values, "product": product})
        numbers = [rates.usable_bytes, rates.bf16, rates.bandwidth, *(x for x in (rates.fp8, rates.link) if x is not None)]
        if len(product) != 3 or not all(0 < number < 1e30 for number in numbers) or not isinstance(rates.card, str):
            raise ValueError("a rate that no card has")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is not a file of measured rates ({type(error).__name__}: {error}): make it with outrider plan "
                        "--calibrate") from error
    return rates
