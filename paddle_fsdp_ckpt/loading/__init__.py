"""``load``: a checkpoint directory read into a model and its optimizers, at any world size."""

from .load import load
from .report import LoadReport

__all__ = ["LoadReport", "load"]
