"""`python -m mlx_dflash.convert`."""

from mlx_dflash.convert.cli import main

main()
