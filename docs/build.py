"""Build the documentation site into site/, strictly: a broken link ends it with an error.

    python docs/build.py

Needs the extra `docs`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import generate

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Write the pages that are not in git, then build. Returns the exit status."""
    generate.write_untracked()
    return subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
