"""``python -m paddle_fsdp_ckpt.cli``: the same as ``paddle-fsdp-ckpt``."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
