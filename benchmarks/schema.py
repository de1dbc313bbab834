"""The file that a benchmark command writes, and what it says of the machine.

One JSON object: "schema" names format and version; "command"; "finished", false where it was stopped and can go on;
"mode", greedy or sampled; "machine"; "setup", all that two results must share to be compared; "requests", what was
recorded of each; "summary", the figures; "marks", one line for each thing that makes the run doubtful.
"""

import json
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlx_dflash.benchmarks.machine import describe

from mlx_dflash.errors import RequestError

SCHEMA = "mlx_dflash.benchmarks/1"
Result = dict[str, Any]


def new_result(command: str, mode: str | None, setup: dict[str, Any]) -> Result:
    """An empty result. mode: "greedy", "sampled", or None where nothing is generated."""
    return {
        "schema": SCHEMA,
        "command": command,
        "finished": False,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "mode": mode,
        "machine": machine(),
        "setup": setup,
        "requests": [],
        "summary": {},
        "marks": [],
    }


def write(result: Result, path: Path | None) -> None:
    """Write beside the old file, then put it in its place; nothing where there is no path. A request is a line."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    text = json.dumps({**result, "requests": []}, indent=1, ensure_ascii=False)
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in result["requests"])
    text = text.replace('\n "requests": []', f'\n "requests": [\n  {rows}\n ]' if rows else '\n "requests": []', 1)
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path) -> Result:
    """A result that `write` wrote. Raises RequestError for anything else, and for another version."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} can't be read as a benchmark result: {error}") from error
    found = result.get("schema") if isinstance(result, dict) else None
    if found != SCHEMA:
        raise RequestError(f"{path} is {found or 'no benchmark result'}; this version reads {SCHEMA}")
    return dict(result)


def resumed(path: Path | None, fresh: Result) -> Result:
    """The result in `path` if it is of the same command and setup, to go on with, else `fresh`.

    Raises RequestError where the file holds something else: nothing is overwritten.
    """
    if path is None or not path.exists():
        return fresh
    old = read(path)
    for name in ("command", "mode", "setup"):
        if old[name] != json.loads(json.dumps(fresh[name])):
            raise RequestError(f"{path} holds another run (its {name} differs); choose another --output, or remove it")
    return {**old, "marks": [], "machine": fresh["machine"]}


def machine() -> dict[str, Any]:
    """What the result ran on, power and swap included; None where the system doesn't say."""
    return {
        **describe(),
        "os": " ".join(platform.mac_ver()[:1] if platform.mac_ver()[0] else (platform.system(), platform.release())),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cores": os.cpu_count(),
        "load": [round(n, 2) for n in os.getloadavg()],
        "swap_used_bytes": swap_used(),
        **power(),
    }


def swap_used() -> int | None:
    """Bytes of swap in use."""
    if platform.system() == "Darwin":
        found = re.search(r"used = ([\d.]+)M", said("sysctl", "-n", "vm.swapusage"))
        return int(float(found[1]) * 2**20) if found else None
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    sizes = {name: int(kb) * 1024 for name, kb in re.findall(r"^(SwapTotal|SwapFree): *(\d+) kB", text, re.MULTILINE)}
    return sizes["SwapTotal"] - sizes["SwapFree"] if len(sizes) == 2 else None


def power() -> dict[str, Any]:
    """Where the power comes from ("AC", "battery"), and whether the system saves it."""
    if platform.system() == "Darwin":
        source = said("pmset", "-g", "batt")
        saving = re.search(r"lowpowermode\s+(\d)", said("pmset", "-g"))
        on = "AC" if "AC Power" in source else "battery" if "Battery Power" in source else None
        return {"power_source": on, "low_power_mode": saving[1] == "1" if saving else None}
    supplies = [(read_line(path / "type"), path) for path in Path("/sys/class/power_supply").glob("*")]
    mains = [read_line(path / "online") == "1" for kind, path in supplies if kind == "Mains"]
    has_battery = any(kind == "Battery" for kind, _ in supplies)
    on = "AC" if any(mains) or not has_battery else "battery"
    profile = read_line(Path("/sys/firmware/acpi/platform_profile"))
    return {"power_source": on, "low_power_mode": None if profile is None else profile == "low-power"}


def read_line(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def said(*command: str) -> str:
    """What a program prints; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
