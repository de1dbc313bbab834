"""`python -m mlx_dflash.benchmarks.proposals`: how should a drafter propose when the target samples?

Real decoding of held-out prompts, at several temperatures, with each way of proposing: the drafter's likeliest tokens
(argmax), tokens drawn with the noise that the target's will be drawn with (coupled, at a few draft temperatures), and
the textbook's rejection sampling (Leviathan et al., arXiv 2211.17192), which lives here only: it is as exact in
distribution, but its tokens depend on the drafter. Mean accepted length, with a bootstrap over prompts.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_dflash.benchmarks.machine import describe
from mlx_dflash.benchmarks.output import write_result

from mlx_dflash import load, load_drafter
from mlx_dflash.accept import Choice, Drawn, Sampler, Sampling, gumbel
from mlx_dflash.decode import Decoder, State
from mlx_dflash.drafters import DFlashDrafter
from mlx_dflash.stats import Observer
from mlx_dflash.training.prompts import held_out_prompts
from mlx_dflash.width import fixed


class Rejection(Sampler):
    """Draft x is kept with probability min(1, p(x) / q(x)), else replaced by a draw from the rest of p over q.

    Told through the usual draws: one equals its draft exactly if the draft is kept. Noise for drafting, deciding and
    redrawing comes from streams of their own.
    """

    q: mx.array | None = None  # (w - 1, vocab) the drafter's probabilities in this round

    def proposals(self, position: int, rows: int) -> Choice:
        noise = gumbel(self.seed_of(1), position, (rows, self.vocab))

        def choose(scores: mx.array, slot: int = 0, ids: mx.array | None = None) -> mx.array:
            if ids is not None:
                raise SystemExit("this arm needs a drafter with the target's vocabulary and no selector")
            scores = scores.astype(mx.float32) / self.draft_temp
            self.q = mx.softmax(scores, axis=-1)
            return mx.argmax(scores + noise[: len(scores)], axis=-1)

        return choose

    def draw(self, logits: mx.array, ids: mx.array, tokens: list[int], before: int) -> Drawn:
        logits = logits.astype(mx.float32)
        p = mx.softmax(logits / self.sampling.temp, axis=-1)
        noise = gumbel(self.seed_of(2), before + 1, logits.shape)
        if len(ids) == 1 or self.q is None:
            return Drawn(mx.argmax(mx.log(p) + noise, axis=-1))
        drafts = ids[1:, None]
        coins = mx.exp(-mx.exp(-gumbel(self.seed_of(3), before + 1, (len(ids) - 1, 1))))  # uniform
        kept = coins * mx.take_along_axis(self.q, drafts, axis=-1) < mx.take_along_axis(p[:-1], drafts, axis=-1)
        rest = mx.log(mx.maximum(p[:-1] - self.q, 0.0))
        redrawn = mx.argmax(rest + noise[:-1], axis=-1)
        last = mx.argmax(mx.log(p[-1:]) + noise[-1:], axis=-1)
        return Drawn(mx.concatenate([mx.where(kept[:, 0], ids[1:], redrawn), last]))

    def seed_of(self, stream: int) -> int:
        return (self.sampling.seed or 0) + stream * 1_000_003


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mlx_dflash.benchmarks.proposals", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model", default="demo")
    parser.add_argument("--temps", type=float, nargs="+", default=[0.3, 0.7, 1.0])
    parser.add_argument(
        "--draft-temps", type=float, nargs="+", default=[1.0], help="times the temperature, for coupled"
    )
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop, with whole sets of arms, after this long")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    result = run(args)
    print(json.dumps(result, indent=1))
    write_result(result, args.output)


def run(args: argparse.Namespace) -> dict[str, Any]:
    target, tokenizer = load(args.model)
    drafter = load_drafter(args.draft_model, target)
    assert isinstance(drafter, DFlashDrafter)
    pool = held_out_prompts()
    prompts = [pool[i * len(pool) // args.prompts][1] for i in range(args.prompts)]
    arms = ["argmax", *(f"coupled x{scale:g}" for scale in args.draft_temps), "rejection"]
    counts: dict[tuple[float, str], list[tuple[int, int]]] = {}  # (tokens, rounds) of every run
    equal = runs = 0
    started = time.monotonic()
    for seed in range(args.seeds):
        for number, prompt in enumerate(prompts):
            if time.monotonic() - started > 60 * args.minutes:
                print("out of time", file=sys.stderr)
                break
            messages = [{"role": "user", "content": prompt}]
            ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
            for temp in args.temps:
                texts = {}
                for arm in arms:
                    sampler = sampler_of(arm, temp, seed + 1000 * number, target.vocab_size)
                    observer = Observer()
                    state = State(list(ids), target.make_cache(), drafter.make_context())
                    ends = set(tokenizer.eos_token_ids)

                    def cut(tokens: list[int], ends: set[int] = ends) -> int | None:
                        return next((i for i, t in enumerate(tokens, 1) if t in ends), None)

                    decoder = Decoder(target, drafter, state, fixed(args.block_size), sampler, cut, observer)
                    texts[arm] = [e.token for e in decoder.run(args.max_tokens)]
                    stats = observer.finish()
                    counts.setdefault((temp, arm), []).append((sum(stats.acceptance_lengths), stats.rounds))
                equal += sum(texts[arm] == texts["argmax"] for arm in arms[1:-1])
                runs += len(arms) - 2
            print(f"seed {seed}, prompt {number + 1}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return {
        "machine": describe(),
        "model": args.model,
        "draft_model": args.draft_model,
        "block_size": args.block_size,
        "max_tokens": args.max_tokens,
        "texts_of_coupled_equal_to_argmax": [equal, runs],
        "rows": [row for temp in args.temps for row in compare(temp, arms, counts)],
    }


def sampler_of(arm: str, temp: float, seed: int, vocab: int) -> Sampler:
    kind = Rejection if arm == "rejection" else Sampler
    scale = float(arm.split("x")[1]) if arm.startswith("coupled") else 1.0
    coupled = arm.startswith("coupled")
    return kind(Sampling(temp, seed=seed), coupled=coupled, draft_temp=scale * temp, vocab=vocab)


def compare(
    temp: float, arms: list[str], counts: dict[tuple[float, str], list[tuple[int, int]]]
) -> list[dict[str, Any]]:
    """Mean accepted length of every arm and its ratio to argmax, with 95% bootstrap intervals over runs, in pairs."""
    size = len(counts[temp, arms[0]])
    rng = random.Random(0)
    draws = [[rng.randrange(size) for _ in range(size)] for _ in range(2000)]

    def tau(arm: str, which: Sequence[int]) -> float:
        picked = [counts[temp, arm][i] for i in which]
        return sum(tokens for tokens, _ in picked) / max(1, sum(rounds for _, rounds in picked))

    def interval(values: list[float]) -> list[float]:
        values = sorted(values)
        return [values[int(0.025 * len(values))], values[int(0.975 * len(values))]]

    rows = []
    for arm in arms:
        everything = range(size)
        rows.append(
            {
                "temp": temp,
                "arm": arm,
                "rounds": sum(rounds for _, rounds in counts[temp, arm]),
                "mean_accepted_length": tau(arm, everything),
                "interval_95": interval([tau(arm, which) for which in draws]),
                "ratio_to_argmax": tau(arm, everything) / tau(arms[0], everything),
                "ratio_interval_95": interval([tau(arm, which) / tau(arms[0], which) for which in draws]),
            }
        )
    return rows


if __name__ == "__main__":
    main()
