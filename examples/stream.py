"""Text as it comes, and what drafting brought: `python examples/stream.py [MODEL [DRAFTER]]`; else the demo."""

import sys

from mlx_dflash import load, load_drafter, stream_generate

names = [*sys.argv[1:], "demo"][:1] + [*sys.argv[2:], "auto"][:1]
model, tokenizer = load(names[0])
drafter = load_drafter(names[1], model)
options = {
    "block_size": 5,
    "max_tokens": 24,
    "temp": 0.7,
    "seed": 1,
}  # block_size "auto" may find that plain decoding is faster
last = None
for last in stream_generate(model, tokenizer, "w5 w9 w200 w31", draft_model=drafter, **options):
    print(last.text, end="", flush=True)
print()
assert last is not None and last.stats is not None
stats = last.stats
print(f"{stats.generation_tokens} tokens, mode {stats.mode}, mean accepted length {stats.mean_accepted_length:.2f}")
