"""Takes names of GPUs ("4x rtx-pro-6000") or a machine's own, gives what a plan needs to know of each; knows nothing of runs."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from outrider.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A card. `usable_bytes`: what CUDA reports as its total (not what the box says). Rates are dense, with fp32 sums, as the
    vendor states them, in operations/s; `bandwidth` of its memory and `link` to the next card (one way) in bytes/s.

    `fp8` is None where the card has no 8-bit matrix units. `measured`: rates were measured on the card itself.
    """

    name: str
    usable_bytes: int
    bf16: float
    fp8: float | None
    bandwidth: float
    link: float
    measured: bool = False


def _gpu(name: str, gib: float, bf16: float, fp8: float | None, bandwidth: float, link: float) -> Gpu:
    return Gpu(name, int(gib * GIB), bf16 * 1e12, fp8 * 1e12 if fp8 else None, bandwidth * 1e9, link * 1e9)


# GiB as torch's own messages give the total; TFLOP/s, GB/s from the vendors' datasheets. Links: PCIe 4 and 5 x16 carry about
# 25 and 50 GB/s, NVLink half of its stated two-way rate. GeForce cards have no peer access: through the host, at half.
CATALOGUE = {gpu.name: gpu for gpu in (
    _gpu("rtx-pro-6000", 94.97, 503.8, 1007.6, 1792, 50),
    _gpu("rtx-6000-ada", 47.38, 364.2, 728.5, 960, 25),
    _gpu("l40s", 44.40, 362.0, 733.0, 864, 25),
    _gpu("rtx-4090", 23.64, 165.2, 330.3, 1008, 12),
    _gpu("rtx-5090", 31.36, 209.5, 419.0, 1792, 25),
    _gpu("a100-40gb", 39.38, 312.0, None, 1555, 300),
    _gpu("a100-80gb", 79.15, 312.0, None, 2039, 300),
    _gpu("h100-80gb", 79.10, 989.0, 1979.0, 3350, 450),
    _gpu("h200", 139.80, 989.0, 1979.0, 4800, 450),
    _gpu("b200", 178.35, 2250.0, 4500.0, 8000, 900),
    _gpu("gb10", 119.60, 125.0, 250.0, 273, 20),
    _gpu("mi300x", 191.69, 1307.0, 2615.0, 5300, 50),
)}
ALIASES = {"dgx-spark": "gb10", "spark": "gb10", "a100": "a100-80gb", "a100-40": "a100-40gb", "a100-80": "a100-80gb",
           "h100": "h100-80gb", "h100-80": "h100-80gb", "4090": "rtx-4090", "5090": "rtx-5090", "6000-ada": "rtx-6000-ada",
           "rtx-pro-6000-blackwell": "rtx-pro-6000"}
# What the driver calls them, most telling part first
DRIVER_NAMES = (("RTX PRO 6000", "rtx-pro-6000"), ("RTX 6000 Ada", "rtx-6000-ada"), ("L40S", "l40s"), ("RTX 4090", "rtx-4090"),
                ("RTX 5090", "rtx-5090"), ("A100-SXM4-40GB", "a100-40gb"), ("A100-PCIE-40GB", "a100-40gb"), ("A100", "a100-80gb"),
                ("H100", "h100-80gb"), ("H200", "h200"), ("B200", "b200"), ("GB10", "gb10"), ("MI300X", "mi300x"))


def parse_gpus(text: str, *, measured: Gpu | None = None) -> list[Gpu]:
    """`"4x rtx-pro-6000"`, `"h200"`, `"2x l40s, 1x h100"` as one Gpu a card. Raises UserError naming the nearest known.

    `measured` stands in for the catalogue's card of its name, or joins the catalogue.
    """
    gpus: list[Gpu] = []
    known = CATALOGUE | ({measured.name: measured} if measured else {})
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d+)\s*x\s+|(\d+)x)?(\S.*?)\s*", part, flags=re.IGNORECASE)
        if match is None:
            raise UserError(f'--gpus "{text}": must read like "4x rtx-pro-6000" or "h200": known are {", ".join(known)}')
        count = int(match[1] or match[2] or 1)
        if not 1 <= count <= 1024:
            raise UserError(f'--gpus "{text}": {count} cards: must be between 1 and 1024')
        gpus += [_by_name(match[3], known)] * count
    return gpus


def _by_name(name: str, known: Mapping[str, Gpu]) -> Gpu:
    key = _slug(name)
    key = ALIASES.get(key, key)
    if key in known:
        return known[key]
    near = difflib.get_close_matches(key, [*known, *ALIASES], n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"
    raise UserError(f"--gpus {name}: not a GPU in the catalogue: {hint}")


def _slug(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def found_gpus(*, measured: Gpu | None = None) -> list[Gpu]:
    """The CUDA devices of this machine, each with its own memory; rates are those of the catalogue's card of that name, or of
    `measured` where it has it. Raises UserError for a card that neither knows.
    """
    import torch  # seconds, which a plan for cards by name does not need

    return [_found(torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory, measured)
            for i in range(torch.cuda.device_count())]


def catalogue_name(driver_name: str) -> str:
    """What the catalogue calls the card that the driver calls so; for one that it does not know, the driver's name as a word."""
    return next((name for part, name in DRIVER_NAMES if part.lower() in driver_name.lower()), _slug(driver_name))


def _found(driver_name: str, total_bytes: int, measured: Gpu | None) -> Gpu:
    name = catalogue_name(driver_name)
    gpu = measured if measured and measured.name == name else CATALOGUE.get(name)
    if gpu is None:
        raise UserError(f"{driver_name}: not in the catalogue of GPUs: measure it with --calibrate, or name the nearest with "
                        "--gpus, for example --gpus a100-80gb")
    return replace(gpu, usable_bytes=total_bytes)
