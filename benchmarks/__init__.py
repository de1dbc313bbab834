"""Measurements: what a test must not time, and runs too long for one. Results lie in benchmarks/results/."""
