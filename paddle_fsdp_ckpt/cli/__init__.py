"""The command line: ``paddle-fsdp-ckpt``, which needs no Paddle. Exit status: 0 all is good, 1 it found something, 2 it can't."""
