"""Benchmarks: ratios against plain reads and writes, stock Paddle, and PyTorch FSDP2 with DCP; ``python -m benchmarks`` runs all."""
