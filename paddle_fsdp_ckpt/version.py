"""The version, in one place: ``setup.py`` and the manifest of a checkpoint read it too."""

__version__ = "0.1.0"
