"""Make the golden checkpoints of the present format version: ``PYTHONPATH=.:tests python tests/golden/make.py``, in the project's folder.

Only for a new format version. Those of older versions are never made again: that what is kept here can still be read is the point.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from golden_adapters import save as save_adapters
from golden_cases import KINDS, expected, save
from harness import RankPool

from paddle_fsdp_ckpt.storage.format import FORMAT_VERSION

HERE = Path(__file__).resolve().parent


def main() -> None:
    with RankPool(1, initialised=False) as pool:
        (values,) = pool.run(expected)
    np.savez_compressed(HERE / f"v{FORMAT_VERSION}_expected.npz", **values)
    for kind in KINDS:
        with RankPool(2) as pool:
            pool.run(save, kind, str(HERE / f"v{FORMAT_VERSION}_{kind}"))
    with RankPool(2) as pool:
        pool.run(save_adapters, str(HERE / f"adapters_v{FORMAT_VERSION}"))


if __name__ == "__main__":
    main()
