"""`python -m mlx_dflash.doctor`: what this installation runs on, what is wrong with it, and the remedy."""

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import mlx.core as mx
from huggingface_hub import constants, get_token

from . import __version__, memory, registry
from .benchmarks.machine import loaded_blas, processor, rows_independent
from .download import size_text
from .hub import DEMO_FOLDER, cache_folder

GOOD, NOTE, BAD = "ok", "note", "WRONG"


@dataclass(frozen=True)
class Finding:
    """status: ok, note (works, but could be better) or WRONG. remedy: '' where there is nothing to do."""

    subject: str
    status: str
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """All findings; never raises for what is wrong with the machine."""
    return [
        python_found(),
        *map(package, ("mlx", "mlx-lm", "huggingface-hub", "numpy")),
        device(),
        *([blas()] if sys.platform == "linux" else []),
        memory_found(),
        own_cache(),
        hub_cache(),
        token(),
    ]


def python_found() -> Finding:
    found = f"{platform.python_version()} on {platform.platform()}, mlx_dflash {__version__}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return Finding("python", BAD, f"{found}, an Intel build", "install an arm64 Python; MLX needs Apple silicon")
    return Finding("python", GOOD, found)


def package(name: str) -> Finding:
    """A package's version, held against what mlx_dflash asks for."""
    bounds = asked_for(name)
    text = ",".join(f"{sign}{bound}" for sign, bound in bounds)
    extra = "[cpu]" if name == "mlx" and sys.platform == "linux" else ""  # else there is no backend
    remedy = f"python -m pip install '{name}{extra}{text}'"
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, BAD, "not installed", remedy)
    if not all(within(found, sign, bound) for sign, bound in bounds):
        return Finding(name, BAD, f"{found}, needs {text}", remedy)
    return Finding(name, GOOD, found)


def asked_for(name: str) -> list[tuple[str, str]]:
    """The bounds on a package's version that mlx_dflash was installed with: ('>=', '0.32.0'), ('<', '0.33')."""
    for wanted in requires("mlx-dflash") or []:
        if re.match(rf"{name}(\[.*\])?(?=[<>=;]|$)", wanted.replace(" ", "")):
            return sorted(re.findall(r"(>=|<)([\d.]+)", wanted.partition(";")[0]), reverse=True)
    return []


def within(found: str, sign: str, bound: str) -> bool:
    numbers = [[int(n) for n in re.findall(r"\d+", v)[:3]] for v in (found, bound)]
    return numbers[0] >= numbers[1] if sign == ">=" else numbers[0] < numbers[1]


def device() -> Finding:
    name = str(mx.default_device())
    if mx.metal.is_available():
        name += f", {mx.device_info().get('device_name', 'Metal')}"
        if mx.default_device() == mx.Device(mx.cpu):
            return Finding("device", NOTE, name, "MLX is set to the CPU; unset that to use the GPU")
    elif sys.platform == "darwin":
        return Finding("device", BAD, f"{name}, no Metal", "run on Apple silicon, outside a virtual machine")
    try:
        ones = mx.ones((4, 4))
        if (ones @ ones).sum().item() != 64:
            return Finding("device", BAD, f"{name} multiplies wrongly", "reinstall mlx; then run mlx_dflash.selftest")
    except RuntimeError as e:
        return Finding("device", BAD, f"{name} does not compute: {' '.join(str(e).split())[:100]}", "reinstall mlx")
    return Finding("device", GOOD, f"{name}, {processor()}")


def blas() -> Finding:
    found = loaded_blas()
    if rows_independent():
        return Finding(
            "BLAS", NOTE, f"{found}, of which mlx uses the reference one: exact, but slow", "preload OpenBLAS for speed"
        )
    return Finding("BLAS", GOOD, f"{found}: fast; rows round differently with their number")


def memory_found() -> Finding:
    limit, name = memory.machine_limit()
    best = memory.best_pair(registry.pairs())
    if best is None:
        return Finding("memory", NOTE, f"{name} {memory.gib(limit)}", "no published pair fits; the demo does")
    return Finding("memory", GOOD, f"{name} {memory.gib(limit)}; the largest pair that fits: {best.example}")


def own_cache() -> Finding:
    folder = cache_folder()
    place = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Finding("own cache", BAD, f"{folder} can't be written", "name another folder in MLX_DFLASH_CACHE")
    demo = folder / DEMO_FOLDER
    if demo.exists() and not ((demo / "config.json").exists() and (demo / "model.safetensors").exists()):
        return Finding("own cache", BAD, f"{demo} is incomplete", "python -m mlx_dflash.cache clear")
    return Finding("own cache", GOOD, f"{folder}, {size_text(size_of(folder))}")


def hub_cache() -> Finding:
    folder = Path(constants.HF_HUB_CACHE).expanduser()
    found = f"{folder}, {len(list(folder.glob('models--*')))} models"
    broken = next((p for p in folder.glob("models--*/snapshots/*/*.safetensors") if not p.exists()), None)
    if broken is not None:
        return Finding("hub cache", BAD, f"{broken} is a link to a missing file", f"delete {broken.parent}, run again")
    if constants.HF_HUB_OFFLINE:
        return Finding("hub cache", NOTE, f"{found}; offline", "unset HF_HUB_OFFLINE to download")
    return Finding("hub cache", GOOD, found)


def token() -> Finding:
    if get_token() is None:
        return Finding("hub login", NOTE, "none", "hf auth login, for repositories that need a licence")
    return Finding("hub login", GOOD, "a token is set")


def size_of(folder: Path) -> int:
    """Bytes of a folder's files, links not followed."""
    return sum(p.lstat().st_size for p in folder.rglob("*") if not p.is_dir()) if folder.exists() else 0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    findings = examine()
    if args.json:
        print(json.dumps([asdict(f) for f in findings], indent=1))
    else:
        for f in findings:
            print(f"{f.status:<7}{f.subject:<17}{f.found}" + (f"\n{'':24}-> {f.remedy}" if f.remedy else ""))
    raise SystemExit(1 if any(f.status == BAD for f in findings) else 0)


if __name__ == "__main__":
    main()
