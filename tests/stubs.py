"""Stand-ins for a drafter, and the slow ways to what a target says, for tests of targets and caches."""

import threading
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mlx_dflash import generate


class SeenContext:
    """A draft context that holds nothing but the number of committed tokens."""

    length = 0

    def arrays(self):
        return []

    def checkpoint(self):
        return self.length

    def restore(self, saved):
        self.length = saved


class StubDrafter:
    """A drafter without weights, for any width: drafts come from `script(position of the first draft, count)`."""

    block_size = 64

    def __init__(self, target, script, taps=(0, 2)):
        self.target, self.script, self.taps = target, script, taps

    def make_context(self, window=None, sink=0):
        return SeenContext()

    def append(self, features, context):
        assert features.shape[-1] == len(self.taps) * self.target.hidden_size
        context.length += features.shape[1]

    def rows(self, width, remaining):
        return min(width, remaining + 1)

    def propose(self, anchor, rows, context, draw):
        ids = self.script(context.length + 1, rows - 1)
        assert len(ids) == rows - 1
        return mx.array(ids, mx.uint32)


def truth(prompt, tokens, right=None, vocab=290):
    """A script that drafts the run `tokens`, of every block the first `right` (None: all) and then wrong ids."""

    def script(position, count):
        at = position - len(prompt)
        true = (tokens + [0] * count)[at : at + count]
        return [t if right is None or i < right else (t + 1) % vocab for i, t in enumerate(true)]

    return script


def greedy_from_scratch(target, prompt, count):
    """`count` greedy tokens, each from a fresh cache that gets the whole text in one pass."""
    text = list(prompt)
    for _ in range(count):
        logits, _ = target.forward(mx.array([text]), target.make_cache(), last_logits_only=True)
        text.append(mx.argmax(logits[0, -1]).item())
    return text[len(prompt) :]


def logits_of(target, ids):
    """(len(ids), vocab) fp32 logits of one pass over a fresh cache."""
    return target.forward(mx.array([list(ids)]), target.make_cache())[0][0].astype(mx.float32)


def mlx_lm_greedy(folder, prompt, count):
    """`count` greedy tokens of mlx-lm itself, quantized layers as they are, and each one's lead in logits."""
    model, _ = load_model(Path(folder))
    steps = list(generate_step(mx.array(prompt), model, max_tokens=count))
    best_two = [mx.sort(logprobs)[-2:] for _, logprobs in steps]
    return [token for token, _ in steps], min((top[1] - top[0]).item() for top in best_two)


def assert_width_equals_plain(target, tokenizer, prompt, greedy, width):
    """With a perfect drafter, one that is never right, and one that is right for a few rows."""
    for right in (None, 0, 2) if width > 1 else (None,):
        drafter = StubDrafter(target, truth(prompt, greedy, right))
        run = generate(target, tokenizer, prompt, draft_model=drafter, block_size=width, max_tokens=len(greedy))
        assert run.tokens == greedy
        lengths = run.stats.acceptance_lengths
        if width > 1:
            assert set(lengths[:-1]) <= {width if right is None else min(right + 1, width)} and lengths


def in_another_thread(call):
    """What `call` returns when another thread makes it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]
