"""Proof on the user's own machine: tiny pairs against the torch references, and what verifying more rows costs here.

`python -m mlx_dflash.selftest` needs no download and takes up to three minutes.
"""
