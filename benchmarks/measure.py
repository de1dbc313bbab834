"""One request of one arm, and what is recorded of it.

Ours are timed as a client would be, by when the tokens of a stream come; the tokens of a round come together and count
as one arrival. The next round is launched before they are given out, and a CPU backend waits there; `first_commit` is
when the first token was known. Stock mlx-lm runs on the same module with the same weights.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_dflash.benchmarks.metrics import Record, has_loop, record_hash
from mlx_dflash.benchmarks.prompts import Prompt
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_dflash import stream_generate
from mlx_dflash.remembered import Memory
from mlx_dflash.report import first_difference
from mlx_dflash.targets import Target
from mlx_dflash.text import apply_template

PLAIN, STOCK = "plain", "mlx-lm"
COUNTS = ("rounds", "plain_rounds", "drafted", "accepted", "acceptance_lengths", "accepted_by_position",
          "block_sizes", "lookup_rounds", "host_reads", "redraws")  # fmt: skip
PHASES = ("draft_time", "verify_time", "host_time")


@dataclass(frozen=True)
class Arm:
    """A way to decode. options: of `stream_generate`; None: mlx-lm's own loop."""

    name: str
    options: Mapping[str, Any] | None = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """What all requests share. options: of `stream_generate`, sampling with its seed and the caches' kind."""

    target: Target
    tokenizer: Any
    options: Mapping[str, Any]
    max_tokens: int
    interrupted: Callable[[], bool] = lambda: False

    def request(self, arm: Arm, prompt: Prompt, repeat: int = 0, cold: bool = False) -> tuple[Record, list[int]]:
        """Run it; returns the record and the tokens."""
        ids = prompt_ids(self.tokenizer, prompt, self.options.get("thinking"))
        run = self.stock if arm.options is None else self.ours
        record, tokens = run(arm, ids)
        name = {"id": prompt.id, "task": prompt.task, "arm": arm.name, "repeat": repeat, "cold": cold, "error": None}
        return {**name, **record, "tokens_hash": record_hash(tokens), "loop": has_loop(tokens)}, tokens

    def cold(self, arms: Sequence[Arm], prompt: Prompt) -> list[Record] | None:
        """The first request of every arm, which compiles and measures what is not yet; None: stopped by Ctrl-C."""
        records = [self.request(arm, prompt, cold=True)[0] for arm in arms]
        return None if self.interrupted() else records

    def turns(self, arms: Sequence[Arm], prompt: Prompt, repeats: int) -> list[tuple[Record, list[int]]] | None:
        """A prompt's requests, in the order of the arms and then in its reverse; None: stopped, so none is whole."""
        found = []
        for repeat in range(repeats):
            for arm in arms if repeat % 2 == 0 else reversed(arms):
                found.append(self.request(arm, prompt, repeat))
                if self.interrupted():
                    return None
        return found

    def ours(self, arm: Arm, ids: list[int]) -> tuple[Record, list[int]]:
        options = {
            **self.options,
            "max_tokens": self.max_tokens,
            "interrupted": self.interrupted,
            **(arm.options or {}),
        }
        memory, last = Memory(), None
        arrivals: list[list[float]] = []
        tokens: list[int] = []
        began = True  # the next token begins a round
        mx.reset_peak_memory()
        start = time.perf_counter()
        for last in stream_generate(self.target, self.tokenizer, ids, remembered=memory, **options):
            if began:
                arrivals.append([round(time.perf_counter() - start, 6), 0])
            arrivals[-1][1] += 1
            tokens.append(last.token)
            began = not last.from_draft  # a round's drafts come first, then the target's own token
        seconds = time.perf_counter() - start
        assert last is not None and last.stats is not None
        stats = last.stats.to_dict()
        record = {
            "prompt_tokens": stats["prompt_tokens"],
            "cached_tokens": stats["cached_tokens"],
            "tokens": len(tokens),
            "finish_reason": last.finish_reason,
            "ttft": arrivals[0][0],
            "first_commit": stats["ttft"],
            "seconds": seconds,
            "arrivals": arrivals,
            **{name: stats[name] for name in COUNTS},
            "why": stats["width_reason"],
            "timing": stats["timing"],
            **{name: stats[name] for name in PHASES},
            "peak_bytes": stats["peak_memory"],
            "kv_bytes": held_bytes(memory),
        }
        return record, tokens

    def stock(self, arm: Arm, ids: list[int]) -> tuple[Record, list[int]]:
        """mlx_lm.generate_step on the same module; sampled runs draw other noise than ours."""
        stops, arrivals, tokens = set(self.tokenizer.eos_token_ids), [], []
        given = {name: self.options.get(name) for name in ("temp", "top_p", "min_p", "top_k")}
        sampler = make_sampler(**{name: value for name, value in given.items() if value is not None})
        penalties = {n: self.options.get(n) for n in ("logit_bias", "repetition_penalty", "presence_penalty",
                                                       "frequency_penalty")}  # fmt: skip
        processors = make_logits_processors(**{n: v for n, v in penalties.items() if v is not None})
        mx.reset_peak_memory()
        start = time.perf_counter()
        steps = generate_step(
            mx.array(ids),
            self.target.model,
            max_tokens=self.max_tokens,
            sampler=sampler,
            logits_processors=processors,
            kv_bits=self.options.get("kv_bits"),
            kv_group_size=self.options.get("kv_group_size") or 64,
        )
        for token, _ in steps:
            arrivals.append([round(time.perf_counter() - start, 6), 1])
            tokens.append(int(token))
            if tokens[-1] in stops or self.interrupted():
                break
        reason = "stop" if tokens[-1] in stops else "length"
        record = {
            "prompt_tokens": len(ids),
            "cached_tokens": 0,
            "tokens": len(tokens),
            "finish_reason": "interrupted" if self.interrupted() else reason,
            "ttft": arrivals[0][0],
            "seconds": time.perf_counter() - start,
            "arrivals": arrivals,
            "peak_bytes": mx.get_peak_memory(),
        }
        return record, tokens


def prompt_ids(tokenizer: Any, prompt: Prompt, thinking: bool | None = None) -> list[int]:
    """Ids of a prompt through the chat template, tools included; without one, of the bare text."""
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode("\n\n".join(str(m["content"]) for m in prompt.messages)))
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    if prompt.tools:
        options["tools"] = prompt.tools
    return list(apply_template(tokenizer, list(prompt.messages), add_generation_prompt=True, **options))


def held_bytes(memory: Memory) -> dict[str, int]:
    """Bytes that the caches hold after a request, at its real fill."""
    state = memory.state
    assert state is not None
    drafter = [] if state.context is None else state.context.arrays()
    return {"tokens": state.cache.length, "target": size_of(state.cache.arrays()), "drafter": size_of(drafter)}


def size_of(arrays: Iterable[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)


def stock_refusal(target: Target) -> str | None:
    """Why mlx-lm can't run the target's module by itself; None: it can."""
    if type(target.model).__module__.startswith("mlx_lm."):
        return None
    return f"mlx-lm has no {target.config.get('model_type', 'such')} model"


def with_partings(found: Sequence[tuple[Record, list[int]]]) -> list[Record]:
    """Records of one prompt, each with "parts_at": where its text parts from the first one's; None: nowhere."""
    return [{**record, "parts_at": first_difference(found[0][1], tokens)} for record, tokens in found]
