"""Python imports this when a process starts with this folder in PYTHONPATH."""

import sys
from pathlib import Path


sys.path.append(str(Path(__file__).parents[1]))

import engine_settings


engine_settings.install()
