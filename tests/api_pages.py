"""API pages from docstrings: `python -m tests.api_pages` writes docs/api.md."""

import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
# Public objects, in the order of the page.
MODULES: dict[str, tuple[str, ...]] = {
    "mlx_dflash": (
        "load",
        "load_drafter",
        "generate",
        "stream_generate",
        "GenerationResponse",
        "GenerationResult",
        "Stats",
        "Session",
        "DFlashError",
        "CheckpointError",
        "PairError",
        "RequestError",
        "ContextFull",
        "UnsupportedError",
    ),
    "mlx_dflash.memory": ("estimate", "Estimate", "of_pair", "best_pair", "machine_limit"),
    "mlx_dflash.registry": ("pairs", "pair_of", "Pair"),
    "mlx_dflash.doctor": ("examine", "Finding"),
}
HEAD = """# API

Written from docstrings by `python -m tests.api_pages`; `tests/test_docs.py` fails if it is stale.
"""


def page() -> str:
    parts = [HEAD]
    for name, objects in MODULES.items():
        module = importlib.import_module(name)
        parts.append(f"\n## {name}\n")
        parts += [entry(thing, getattr(module, thing)) for thing in objects]
    return "".join(parts)


def entry(name: str, thing: Any) -> str:
    """Heading, signature and docstring of one object."""
    signature = name
    if dataclasses.is_dataclass(thing):
        fields = "\n".join(f"    {f.name}: {text_of(f.type)}" for f in dataclasses.fields(thing))
        signature = f"class {name}:\n{fields}"
    elif inspect.isclass(thing):
        signature = f"class {name}({thing.__base__.__name__})"
    else:
        parameters = [written(p) for p in inspect.signature(thing).parameters.values()]
        signature = f"{name}({', '.join(parameters)})"
        if len(signature) > 100:
            signature = f"{name}(\n    " + ",\n    ".join(parameters) + ",\n)"
    return f"\n### {name}\n\n```python\n{signature}\n```\n\n{inspect.cleandoc(thing.__doc__ or '')}\n"


def written(parameter: inspect.Parameter) -> str:
    """As in the source, but for a default that is a function, whose address differs from run to run."""
    if callable(parameter.default) and parameter.default is not parameter.empty:
        parameter = parameter.replace(default=...)
    return str(parameter).replace("mlx_dflash.", "").replace("Ellipsis", "...")


def text_of(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")
