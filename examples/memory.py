"""What a pair takes, before it is loaded. `python examples/memory.py TARGET_FOLDER DRAFTER_FOLDER`"""

import sys
from pathlib import Path

from mlx_dflash.drafters import open_drafter
from mlx_dflash.memory import estimate
from mlx_dflash.targets import open_target

target = open_target(Path(sys.argv[1]))
drafter = open_drafter(Path(sys.argv[2]), target)
for context in (8192, 131072):
    print("\n".join(estimate(target, drafter, context).lines()), end="\n\n")
