"""``python -m paddle_fsdp_ckpt.demo``: train on two ranks, save in the middle, resume on two, one and three, and compare.

Everything it needs comes with Python and Paddle: a small Qwen3-shaped decoder, and the text of Python's own help.
"""
