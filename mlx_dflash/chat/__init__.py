"""The chat REPL, `python -m mlx_dflash.chat`."""
