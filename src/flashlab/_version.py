"""The version, alone in a file so that any module may read it."""

__version__ = "0.1.0"
