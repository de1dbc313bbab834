"""Prompts of the benchmark commands: built-in ones by task class, a file of the user's own, public datasets.

A prompt is a conversation that waits for a reply. Lists are ordered round-robin over classes, so that a run that is
cut is mixed. Nothing here knows a model or a tokenizer.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mlx_dflash.benchmarks.metrics import record_hash

from mlx_dflash.errors import RequestError

Message = dict[str, Any]
Row = dict[str, Any]

BUILT_IN = Path(__file__).parent / "data" / "prompts.jsonl"
TASKS = (
    "code",
    "maths",
    "chat",
    "reasoning",
    "creative",
    "essay",
    "summarisation",
    "rag",
    "translation",
    "copy-edit",
    "infrastructure",
    "tool-json",
)
OWN = "own"  # the class of a file's prompts that name none
ROLES = ("system", "developer", "user", "assistant", "tool")
SAVED_CHAT = "mlx_dflash conversation"  # as mlx_dflash/saved.py writes it
SAMPLES = 128


@dataclass(frozen=True)
class Prompt:
    """messages: as chat templates take them, no reply at the end. tools: function schemas in OpenAI's form."""

    id: str
    task: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


# Built in


def built_in(tasks: Sequence[str] | None = None, per_class: int | None = None) -> list[Prompt]:
    """The first `per_class` prompts of each of `tasks`; None: all. Raises RequestError for an unknown class."""
    wanted = TASKS if tasks is None else tuple(dict.fromkeys(tasks))
    if unknown := [task for task in wanted if task not in TASKS]:
        raise RequestError(f"no class {', '.join(map(repr, unknown))}; there are {', '.join(TASKS)}")
    if per_class is not None and per_class < 1:
        raise RequestError(f"--per-class must be 1 or more, not {per_class}")
    found = from_file(BUILT_IN)
    return mixed([prompt for task in wanted for prompt in [p for p in found if p.task == task][:per_class]])


def mixed(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of each class, then the second of each, and so on; classes in the order in which they come."""
    classes: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        classes.setdefault(prompt.task, []).append(prompt)
    return [prompt for turn in zip_longest(*classes.values()) for prompt in turn if prompt is not None]


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """Sixteen hex digits of ids, messages and tools, in their order."""
    return record_hash([[p.id, p.messages, p.tools] for p in prompts])


# Files


def from_file(path: str | Path) -> list[Prompt]:
    """Prompts of a JSONL file, or the conversation of a saved chat.

    A line has "messages" (a conversation; replies at its end are left out), "prompt" (one message) or "turns" (user
    messages, one after the other with no replies between them), and if wanted "id", "task" and "tools"; other keys are
    left aside. Raises RequestError naming file and line.
    """
    path = Path(path)
    try:
        head = saved_head(path)
        if head is not None:
            return [from_saved(path, head)]
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} can't be read as prompts: {error}") from error
    lines: dict[str, int] = {}
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):  # JSON may hold what splitlines takes for the end of a line
        if not line.strip():
            continue
        try:
            prompt = from_line(line, f"{path.stem}-{number}")
            if prompt.id in lines:
                raise ValueError(f"the id {prompt.id!r} is that of line {lines[prompt.id]}")
        except ValueError as error:
            raise RequestError(f"{path}, line {number}: {error}") from error
        lines[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise RequestError(f"{path} holds no prompts")
    return mixed(prompts)


def from_line(line: str, default_id: str) -> Prompt:
    """A prompt of a JSON object. Raises ValueError, which JSON's own errors are too."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError('not a JSON object, such as {"prompt": "..."}')
    given = [name for name in ("messages", "prompt", "turns") if row.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f'needs one of "messages", "prompt" and "turns", not {" and ".join(given) or "none"}')
    for name in ("id", "task"):
        if row.get(name) is not None and not (isinstance(row[name], str) and row[name].strip()):
            raise ValueError(f'"{name}" must be a text, not {row[name]!r}')
    messages = waiting(messages_of(given[0], row[given[0]]))
    return Prompt(row.get("id") or default_id, row.get("task") or OWN, messages, tools_of(row.get("tools")))


def messages_of(form: str, value: Any) -> list[Message]:
    """Messages of what stands under "messages", "prompt" or "turns"."""
    if form == "messages":
        return checked(value)
    texts = [value] if form == "prompt" else value
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        raise ValueError(f'"{form}" must be {"a text" if form == "prompt" else "a list of texts"}, and not empty')
    return [{"role": "user", "content": text} for text in texts]


def checked(messages: Any) -> list[Message]:
    """The messages, each with a known role and a text; only a reply that calls tools may go without one."""
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list, and not empty')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"message {number} needs a role: {', '.join(ROLES)}")
        content, calls = message.get("content"), message["role"] == "assistant" and message.get("tool_calls")
        if not isinstance(content, str) and not (calls and content is None):
            raise ValueError(f'message {number} needs a text as its "content"')
    return messages


def waiting(messages: list[Message]) -> list[Message]:
    """The messages up to the last that a reply can follow: a user's, or a tool's result."""
    kept = list(messages)
    while kept and kept[-1]["role"] == "assistant":
        kept.pop()
    if not kept or not any(message["role"] == "user" for message in kept):
        raise ValueError("there is no user message to reply to")
    if kept[-1]["role"] not in ("user", "tool"):
        raise ValueError(f"it ends with a {kept[-1]['role']} message; a user's must come last")
    return kept


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Function schemas, or None where there are none."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError('"tools" must be a list of function schemas')
    return value


def saved_head(path: Path) -> Row | None:
    """Metadata of a safetensors file, which is JSON after a length of eight bytes; None of any other file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size - 8:  # of a text its first letters, a huge number
            return None
        try:
            head = json.loads(file.read(length))
        except ValueError:
            return None
    return (head.get("__metadata__") or {}) if isinstance(head, dict) else None


def from_saved(path: Path, metadata: Row) -> Prompt:
    """The conversation of a saved chat, its system prompt included."""
    if metadata.get("format") != SAVED_CHAT:
        raise RequestError(f"{path} is a safetensors file but no saved chat")
    try:
        facts = json.loads(metadata["head"])["facts"]
        system = [{"role": "system", "content": facts["system"]}] if facts["system"] else []
        return Prompt(path.stem, OWN, waiting(checked([*system, *facts["turns"]])))
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path}: the saved chat can't be used: {error}") from error


# Datasets


@dataclass(frozen=True)
class Source:
    """A dataset on the hub, and how a row becomes a message."""

    repo: str
    config: str | None
    split: str
    question: Callable[[Row], str]


def stepwise(problem: str) -> str:
    return f"{problem}\n\nWork it out step by step and give the answer alone on the last line."


def completed(code: str) -> str:
    return (
        f"Complete this Python function. Give the whole function in one code block.\n\n```python\n{code.rstrip()}\n```"
    )


def tested(row: Row) -> str:
    tests = "\n".join(row["test_list"])
    return f"{row['prompt']} Give one code block of Python. It must pass these tests:\n\n```python\n{tests}\n```"


SOURCES = {
    "gsm8k": Source("openai/gsm8k", "main", "test", lambda row: stepwise(row["question"])),
    "math500": Source("HuggingFaceH4/MATH-500", None, "test", lambda row: stepwise(row["problem"])),
    "humaneval": Source("openai/openai_humaneval", None, "test", lambda row: completed(row["prompt"])),
    "mbpp": Source("google-research-datasets/mbpp", "sanitized", "test", tested),
    "mt-bench": Source("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: str(row["prompt"][0])),
}


def load_dataset(repo: str, config: str | None, split: str) -> Any:
    """Rows of a dataset, by index. Raises RequestError where the package is missing."""
    try:
        import datasets
    except ImportError as error:
        raise RequestError("--datasets needs a package: pip install 'mlx-dflash[datasets]'") from error
    return datasets.load_dataset(repo, config, split=split)


def from_datasets(names: Sequence[str], count: int = SAMPLES) -> list[Prompt]:
    """`count` rows of each dataset, fewer where it has no more, drawn alike every time; the class is its name."""
    if unknown := [name for name in names if name not in SOURCES]:
        raise RequestError(f"no dataset {', '.join(map(repr, unknown))}; there are {', '.join(SOURCES)}")
    if count < 1:
        raise RequestError(f"--samples must be 1 or more, not {count}")
    return mixed([prompt for name in dict.fromkeys(names) for prompt in drawn(name, count)])


def drawn(name: str, count: int) -> Iterator[Prompt]:
    source = SOURCES[name]
    try:
        rows = load_dataset(source.repo, source.config, source.split)
        order = list(range(len(rows)))
        random.Random(0).shuffle(order)
        for index in order[:count]:
            message = {"role": "user", "content": source.question(rows[index])}
            yield Prompt(f"{name}-{index}", name, [message])
    except RequestError:
        raise
    except Exception as error:  # of the hub's client, of the network, or of another layout than was expected
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise RequestError(f"{name} ({source.repo}) can't be loaded: {why}") from error


# Flags


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that choose the prompts, for `chosen`."""
    add = parser.add_argument_group("prompts").add_argument
    add("--tasks", nargs="+", default=None, metavar="CLASS", help=f"classes of built-in prompts: {', '.join(TASKS)}")
    add("--per-class", type=int, default=None, metavar="N", help="built-in prompts of each class (default: all)")
    add("--prompts", type=Path, default=None, metavar="FILE", help="prompts of your own: JSONL, or a saved chat")
    add("--datasets", nargs="+", default=None, metavar="NAME", help=f"public datasets: {', '.join(SOURCES)}")
    add("--samples", type=int, default=None, metavar="N", help=f"rows of each dataset (default: {SAMPLES})")


def chosen(args: argparse.Namespace) -> tuple[list[Prompt], str]:
    """The prompts that the flags ask for, and where they come from. Raises RequestError for contradictions."""
    if args.prompts is not None and args.datasets is not None:
        raise RequestError("--prompts and --datasets contradict each other; give one of them")
    elsewhere = "--prompts" if args.prompts is not None else "--datasets" if args.datasets is not None else None
    if elsewhere and (args.tasks is not None or args.per_class is not None):
        raise RequestError(f"--tasks and --per-class choose built-in prompts; drop them or {elsewhere}")
    if args.samples is not None and args.datasets is None:
        raise RequestError("--samples counts the rows of --datasets; give a dataset, or --per-class instead")
    if args.prompts is not None:
        return from_file(args.prompts), f"file {args.prompts.name}"
    if args.datasets is not None:
        names = listed(args.datasets)
        return from_datasets(names, SAMPLES if args.samples is None else args.samples), f"datasets {', '.join(names)}"
    return built_in(None if args.tasks is None else listed(args.tasks), args.per_class), "built in"


def listed(values: Sequence[str]) -> list[str]:
    """Names that were separated by blanks or commas, each once. Raises RequestError where none is left."""
    names = list(dict.fromkeys(name for value in values for part in value.split(",") if (name := part.strip())))
    if not names:
        raise RequestError(f"no name in {' '.join(values)!r}")
    return names
