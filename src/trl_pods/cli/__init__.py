"""The command line `trl-pods`. Importing it, `--help` and `--version` do without torch."""

from .main import main


__all__ = ["main"]
