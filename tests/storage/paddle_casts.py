"""What Paddle makes of values when it converts them; run in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle


def paddle_casts(values: dict[str, np.ndarray], pairs: Sequence[tuple[str, str]]) -> list[np.ndarray]:
    """Return the values of each pair's first type as its second; a bfloat16 as the bits."""
    found = []
    for source, target in pairs:
        tensor = paddle.to_tensor(values[source])
        if source == "bfloat16":
            tensor = paddle.to_tensor((values[source].astype(np.uint32) << 16).view(np.float32)).astype("bfloat16")
        array = tensor.astype(target).numpy()
        found.append(array.view(np.uint16) if target == "bfloat16" else array)
    return found
