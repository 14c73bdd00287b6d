"""Where a user's Rollbook keeps its files: ROLLBOOK_HOME, or `.rollbook/` in the working folder."""

import os
from pathlib import Path


def home_folder() -> Path:
    return Path(os.environ.get("ROLLBOOK_HOME") or ".rollbook").resolve()


def store_url(home: Path) -> str:
    """The store that is used where none is named."""
    return f"file://{home / 'store'}"


def cache_folder(home: Path) -> Path:
    """Verified local copies of policies and states, and indexes of stores: safe to delete."""
    return home / "cache"
