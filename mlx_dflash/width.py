"""How many rows a round verifies, the anchor included; 1 is plain decoding.

`auto` starts where stock Metal kernels still read the weights once per matmul: a tile of at most 5 rows.
"""

from collections.abc import Callable

from .drafters import DFlashDrafter
from .errors import RequestError

START_ROWS = 5


def make_width(block_size: int | str, drafter: DFlashDrafter | None) -> Callable[[], int]:
    """The width of every round, for `block_size` "auto" or a number of rows; refuses one above the trained block."""
    if block_size != "auto" and (not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1):
        raise RequestError(f'block_size must be "auto" or a whole number of rows, 1 or more, not {block_size!r}')
    if drafter is None:
        if isinstance(block_size, int) and block_size > 1:
            raise RequestError(f"block_size {block_size} needs a draft model; without one only 1 (plain) is possible")
        return lambda: 1
    trained = drafter.block_size
    if isinstance(block_size, int) and block_size > trained:
        raise RequestError(f"block size {block_size} is above the drafter's trained block; use {trained} or less")
    rows = block_size if isinstance(block_size, int) else min(START_ROWS, trained)
    return lambda: rows
