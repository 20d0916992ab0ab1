"""Checkpoints in forms that others read, made and looked into where Paddle is not installed."""
