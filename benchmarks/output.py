"""Where a benchmark's result goes."""

import json
from pathlib import Path
from typing import Any


def write_result(result: dict[str, Any], path: Path | None) -> None:
    """Write a result as JSON to `path`, whose folders are made; nothing where there is no path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
