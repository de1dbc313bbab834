"""Torch references for mlx_dflash: tiny checkpoints and the arrays that a parity test compares with.

Needs torch and transformers, and knows nothing of MLX or mlx_dflash.  See README.md in this folder.
"""
