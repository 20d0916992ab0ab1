"""Time a training step of one process with the demo's decoder: sharded against plain. What the runtime costs besides communication."""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import paddle
from paddle.nn import functional as F

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.demo.model import CausalLM, DecoderConfig

VOCABULARY = 256


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="sequences of 128 tokens a step")
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    trainings = {name: _make(options.width, options.layers, sharded) for name, sharded in (("plain", False), ("sharded", True))}
    tokens = paddle.to_tensor(np.random.RandomState(0).randint(0, VOCABULARY, [options.rows, 128]))
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for run in range(options.runs + 2):
        for name, (model, optimizer) in trainings.items():
            start = time.perf_counter()
            F.cross_entropy(model(tokens).reshape([-1, VOCABULARY]), tokens.reshape([-1])).backward()
            optimizer.step()
            optimizer.clear_grad()
            if run >= 2:  # The first ones allocate.
                seconds[name].append(time.perf_counter() - start)
    plain, sharded = (statistics.median(seconds[name]) for name in ("plain", "sharded"))
    ratios = [one / other for one, other in zip(seconds["sharded"], seconds["plain"], strict=True)]
    print(f"plain {plain * 1e3:.1f} ms, sharded {sharded * 1e3:.1f} ms, median of the ratios {statistics.median(ratios):.2f}")


def _make(width: int, layers: int, sharded: bool) -> tuple[CausalLM, paddle.optimizer.Optimizer]:
    paddle.seed(0)
    model = CausalLM(DecoderConfig(VOCABULARY, width, 3 * width, layers, 4, 2, width // 4))
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    if sharded:
        ckpt.fully_shard(model, optimizer=optimizer)
    return model, optimizer


if __name__ == "__main__":
    main()
