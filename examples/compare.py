"""The same request with and without a drafter gives the same tokens. `python examples/compare.py [MODEL [DRAFTER]]`"""

import sys

from mlx_dflash import generate, load, load_drafter

names = [*sys.argv[1:], "demo"][:1] + [*sys.argv[2:], "auto"][:1]
model, tokenizer = load(names[0])
drafter = load_drafter(names[1], model)
prompt = tokenizer.encode("w5 w9 w200 w31")
drafted = generate(model, tokenizer, prompt, draft_model=drafter, max_tokens=24)
plain = generate(model, tokenizer, prompt, max_tokens=24)
print("equal" if drafted.tokens == plain.tokens else "parted at a near-tie: other widths round differently here")
print(f"{drafted.stats.rounds} rounds for {drafted.stats.generation_tokens} tokens")
