"""``python -m paddle_fsdp_ckpt``: the same as ``paddle-fsdp-ckpt``."""

import sys

from .cli.main import main

sys.exit(main())
