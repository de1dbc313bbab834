"""`python -m mlx_dflash.generate`. Nothing imports it: the name belongs to the function `mlx_dflash.generate`."""

from .cli import main

if __name__ == "__main__":
    main()
