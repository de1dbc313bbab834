"""Training data: the target's own greedy answers, with the hidden states that were tapped while it wrote them.

A work folder holds parts, made one after the other or side by side. A part is `answers*.jsonl`, one Sample a line, and
beside it `features*.f16`, the tapped rows of its first samples in the same order, as many as the size bound leaves room
for; those of the others are computed when they are drawn. A second run goes on after the last complete batch.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from ..errors import RequestError
from ..targets import Target

MOST_BYTES = 20 * 2**30  # of features a part, unless another bound is asked for
THINKING = "thinking.txt"


@dataclass(frozen=True)
class Sample:
    """One conversation turn: templated prompt ids and the answer's ids, the stop token included if it came."""

    task: str
    prompt: list[int]
    answer: list[int]

    @property
    def rows(self) -> int:
        """Tokens that the target was run on: all but the last, after which nothing was predicted."""
        return len(self.prompt) + len(self.answer) - 1


@dataclass
class Features:
    """Rows of all samples, part after part: each a memory map (rows, taps * hidden) fp16.

    places: (part, first row); None where the disk was not to hold them.
    """

    target: Target
    taps: Sequence[int]
    parts: Sequence[np.ndarray]
    places: list[tuple[int, int] | None]
    samples: list[Sample]

    def of(self, index: int) -> np.ndarray:
        """The rows of one sample, (sample.rows, taps * hidden)."""
        place = self.places[index]
        if place is None:
            return forward_features(self.target, self.samples[index], self.taps)
        part, first = place
        return np.asarray(self.parts[part][first : first + self.samples[index].rows])


def greedy(logits: mx.array, step: int) -> mx.array:
    return mx.argmax(logits, axis=-1)


def decode_batch(
    target: Target,
    prompts: list[list[int]],
    stops: Sequence[int],
    max_tokens: int,
    taps: Sequence[int] = (),
    choose: Callable[[mx.array, int], mx.array] = greedy,
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Plain decoding of prompts of one length, side by side.

    choose: logits (B, vocab) and the step's number -> tokens (B,). Returns each answer, its stop token included, and
    each one's features (prompt + answer - 1, taps * hidden) fp16, empty without taps.
    """
    cache, ids = target.make_cache(), mx.array(prompts, mx.uint32)
    places = list(range(len(prompts)))  # whose rows the batch holds, those of ended answers included
    live = set(places)
    answers: list[list[int]] = [[] for _ in prompts]
    rows: list[list[np.ndarray]] = [[] for _ in prompts]
    for step in range(max_tokens):
        logits, features = target.forward(ids, cache, taps, last_logits_only=True)
        tokens = choose(logits[:, -1], step)
        half = None if features is None else features.astype(mx.float16)
        mx.eval(tokens, [] if half is None else half, cache.arrays())
        new = None if half is None else np.array(half)
        for row, (i, token) in enumerate(zip(places, np.array(tokens).tolist(), strict=True)):
            if i in live:
                answers[i].append(token)
                if new is not None:
                    rows[i].append(new[row])
                if token in stops:
                    live.discard(i)
        if not live:
            break
        ids = tokens[:, None]
        if len(live) <= 0.85 * len(places):  # dropping rows copies the cache, so not one at a time
            kept = mx.array([row for row, i in enumerate(places) if i in live])
            places = [i for i in places if i in live]
            for layer in cache.layers:
                state = {k: v for k, v in vars(layer).items() if isinstance(v, mx.array)}
                vars(layer).update(tree_map(lambda a, kept=kept: a[kept], state))
            ids = ids[kept]
    return answers, [np.concatenate(r) if r else np.zeros((0, 0), np.float16) for r in rows]


def generate_answers(
    target: Target,
    tokenizer: Any,
    prompts: Sequence[tuple[str, str | list[dict[str, Any]]]],
    folder: Path,
    taps: Sequence[int],
    *,
    part: str = "",
    max_tokens: int = 160,
    batch: int = 128,
    thinking: bool | None = None,
    most_bytes: int = MOST_BYTES,
    report: Callable[[str], None] = print,
) -> None:
    """Append a Sample and its features per (class, prompt or messages) to a part; prompts that any part has are passed
    over.

    Prompts of one length are decoded together. An answer that does not end by itself is cut at `max_tokens`. thinking:
    on or off in the chat template, None: as the template does. Features beyond `most_bytes` a part are not kept. Raises
    RequestError if the part was made with other taps, or with thinking otherwise.
    """
    path, rows_path = folder / f"answers{part}.jsonl", folder / f"features{part}.f16"
    done = load_samples(path)
    width = len(taps) * target.hidden_size
    check_taps(folder, taps, width, write=True)
    check_thinking(folder, thinking)
    rows_path.touch()
    counts = [s.rows for s in done]
    whole = whole_rows(counts, rows_path.stat().st_size // (width * 2))
    with rows_path.open("r+b") as f:  # rows of a batch whose lines were never written
        f.truncate(whole * width * 2)
    rows, all_kept = whole, whole == sum(counts)  # on disk; are they of all samples so far?

    known = {tuple(s.prompt) for s in load_answers(folder)}
    by_length: dict[int, list[tuple[str, list[int]]]] = {}
    switch = {} if thinking is None else {"enable_thinking": thinking}
    for task, text in prompts:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, **switch))
        if tuple(ids) not in known:
            known.add(tuple(ids))
            by_length.setdefault(len(ids), []).append((task, ids))
    batches = [group[i : i + batch] for group in by_length.values() for i in range(0, len(group), batch)]
    np.random.default_rng(0).shuffle(batches)  # so that a part that is cut short is mixed

    stops = sorted(tokenizer.eos_token_ids)
    finished, total = 0, sum(map(len, batches))
    for group in batches:
        answers, features = decode_batch(target, [ids for _, ids in group], stops, max_tokens, taps)
        with rows_path.open("ab") as f:
            for tapped in features:
                all_kept = all_kept and (rows + len(tapped)) * width * 2 <= most_bytes
                if all_kept:
                    f.write(tapped.tobytes())
                    rows += len(tapped)
        append_samples(path, [Sample(task, ids, a) for (task, ids), a in zip(group, answers, strict=True)])
        finished += len(group)
        report(f"generated {finished} of {total} answers")


def check_taps(folder: Path, taps: Sequence[int], width: int, write: bool = False) -> None:
    """Raise RequestError if the folder's features are of other taps; `write`: note these if it has none yet."""
    path = folder / "features.json"
    wanted = {"taps": list(taps), "width": width}
    if path.exists():
        found = json.loads(path.read_text())
        if found != wanted:
            raise RequestError(f"{folder} holds features of taps {found['taps']}, not {list(taps)}; use another folder")
    elif write:
        path.write_text(json.dumps(wanted) + "\n")


def check_thinking(folder: Path, thinking: bool | None) -> None:
    """Note whether the answers think; RequestError if those that are there were made otherwise."""
    path = folder / THINKING
    wanted = {None: "as the template does", True: "on", False: "off"}[thinking]
    if path.exists() and (found := path.read_text().strip()) != wanted:
        raise RequestError(f"{folder} holds answers with thinking {found}, not {wanted}; use another folder")
    path.write_text(wanted + "\n")


def thinking_of(folder: Path) -> str:
    """How the folder's answers were made: "on", "off" or "as the template does"."""
    path = folder / THINKING
    return path.read_text().strip() if path.exists() else "as the template does"


def whole_rows(counts: Sequence[int], rows: int) -> int:
    """Of `rows` rows those that are of whole samples, by the samples' rows."""
    total = 0
    for count in counts:
        if total + count > rows:
            break
        total += count
    return total


def prompts_of(path: Path) -> list[tuple[str, str | list[dict[str, Any]]]]:
    """(class, prompt or messages) of a JSON Lines file: objects with "prompt" or "messages", and "task" if known.

    Messages end with a user's. Raises RequestError naming the line that is otherwise.
    """
    out: list[tuple[str, str | list[dict[str, Any]]]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise RequestError(f"{path} can't be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            asked = row.get("prompt") or row["messages"]
            if not isinstance(asked, str) and (not asked or asked[-1]["role"] != "user"):
                raise ValueError("the last message is not a user's")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(
                f"{path}, line {number}: an object with prompt or messages is wanted ({error})"
            ) from error
        out.append((str(row.get("task", "own")), asked))
    if not out:
        raise RequestError(f"{path} holds no prompts")
    return out


def append_samples(path: Path, samples: Sequence[Sample]) -> None:
    lines = [json.dumps(asdict(sample), separators=(",", ":")) + "\n" for sample in samples]
    with path.open("a", encoding="utf-8") as f:
        f.write("".join(lines))


def load_samples(path: Path) -> list[Sample]:
    """The samples of one file; none if there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as f:
        return [Sample(**json.loads(line)) for line in f]


def load_answers(folder: Path) -> list[Sample]:
    """The samples of all parts, in the order of their names."""
    return [sample for path in sorted(folder.glob("answers*.jsonl")) for sample in load_samples(path)]


def load_features(target: Target, folder: Path, taps: Sequence[int], most_bytes: int = MOST_BYTES) -> Features:
    """The features of all parts; those of answers that have none yet (copied in from elsewhere) are computed first, as
    far as they fit in `most_bytes` a part.

    Raises RequestError if the folder holds no answers, or features of other taps.
    """
    named = {p.stem.removeprefix("answers"): load_samples(p) for p in sorted(folder.glob("answers*.jsonl"))}
    if not any(named.values()):
        raise RequestError(f"{folder} holds no answers; run the generate command first")
    width = len(taps) * target.hidden_size
    check_taps(folder, taps, width, write=True)
    parts: list[np.ndarray] = []
    places: list[tuple[int, int] | None] = []
    everything: list[Sample] = []
    for part, mine in named.items():
        path = folder / f"features{part}.f16"
        counts = [s.rows for s in mine]
        starts = np.cumsum([0, *counts]).tolist()
        have = whole_rows(counts, path.stat().st_size // (width * 2) if path.exists() else 0)
        wanted = max(have, whole_rows(counts, most_bytes // (width * 2)))
        if have < wanted:
            path.touch()
            with path.open("r+b") as f:
                f.truncate(have * width * 2)
                f.seek(0, 2)
                for sample in mine[starts.index(have) : starts.index(wanted)]:
                    f.write(forward_features(target, sample, taps).tobytes())
        shape = (wanted, width)
        parts.append(np.memmap(path, np.float16, "r", shape=shape) if wanted else np.zeros(shape, np.float16))
        places += [(len(parts) - 1, at) if at + n <= wanted else None for at, n in zip(starts, counts, strict=False)]
        everything += mine
    return Features(target, taps, parts, places, everything)


def forward_features(target: Target, sample: Sample, taps: Sequence[int]) -> np.ndarray:
    """A sample's rows by a forward over it, (sample.rows, taps * hidden) fp16."""
    ids = mx.array([(sample.prompt + sample.answer)[:-1]], mx.uint32)
    _, rows = target.forward(ids, target.make_cache(), taps, last_logits_only=True)
    assert rows is not None
    return np.array(rows[0].astype(mx.float16))


def tap_scales(features: Features, taps: int, samples: int = 64) -> list[float]:
    """1 / the median rms of each tap over positions >= 1.

    Position 0 carries activations some hundred times larger; a mean over all positions would be ruled by them.
    """
    rms = []
    for i in range(min(samples, len(features.samples))):
        rows = features.of(i)[1:].astype(np.float32)
        rms.append(np.sqrt((rows.reshape(len(rows), taps, -1) ** 2).mean(-1)))
    return [float(1 / m) for m in np.median(np.concatenate(rms), axis=0)]
