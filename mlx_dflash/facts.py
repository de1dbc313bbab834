"""What model cards say and config.json does not: recommended sampling, thinking, trained context. One data file.

Knows names; loads no model.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Facts:
    """thinking: trained on thinking traces, None: unknown. trained_context: tokens, None: unknown.

    recommended: sampling settings under "thinking" and "plain", or "any"; empty: the card recommends none.
    """

    name: str
    thinking: bool | None = None
    trained_context: int | None = None
    recommended: dict[str, dict[str, Any]] | None = None

    def sampling(self, thinking: bool | None) -> dict[str, Any]:
        """The card's sampling; thinking None means that the model does as its chat template says."""
        known = self.recommended or {}
        mode = "plain" if thinking is False else "thinking"
        return known.get(mode) or known.get("any") or {}


def target_facts(name: str) -> Facts | None:
    """Of the target that was loaded from this name or folder; None if nothing is known."""
    return find("targets", name)


def drafter_facts(name: str) -> Facts | None:
    return find("drafters", name)


def find(kind: str, name: str) -> Facts | None:
    for entry in read()[kind]:
        if re.search(entry["match"], name, re.IGNORECASE):
            return Facts(**{key: value for key, value in entry.items() if key != "match"})
    return None


def recommended_names() -> list[str]:
    return [entry["name"] for entry in read()["targets"] if entry.get("recommended")]


@cache
def read() -> dict[str, Any]:
    return json.loads((resources.files("mlx_dflash") / "data" / "models.json").read_text(encoding="utf-8"))


def name_of(folder: Path) -> str:
    """What a model is called, by its folder: the hub's name in its cache, else the folder's own."""
    return cached_name(folder) or folder.name


def cached_name(folder: Path) -> str | None:
    """The hub name behind a folder of the hub's cache (models--OWNER--NAME/snapshots/COMMIT)."""
    for part in reversed(folder.parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return None


def decide_thinking(asked: bool | None, tokenizer: Any, drafter_name: str | None) -> tuple[bool | None, str]:
    """What the chat template gets as `enable_thinking`, and who decided: the request, or what the drafter learnt.

    None: the template has no such switch, or decides itself. A drafter that never saw thinking traces drafts them
    badly, so with one of those thinking is off unless it is asked for.
    """
    if asked is not None:
        return asked, "request"
    facts = None if drafter_name is None else drafter_facts(drafter_name)
    if facts is not None and facts.thinking is False and has_thinking_switch(tokenizer):
        return False, f"drafter {facts.name}, trained without thinking"
    return None, "chat template"


def has_thinking_switch(tokenizer: Any) -> bool:
    return "enable_thinking" in str(getattr(tokenizer, "chat_template", "") or "")
