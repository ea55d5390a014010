"""Build the documentation site into site/, strictly: a broken link ends it with an error, and so does a page with a
table that was not understood or with fonts and scripts from elsewhere, or a file of Python.

    python docs/build.py

Needs the extra `docs`. Pages link to the remote `origin` of the sources, or to the address in the variable REPOSITORY.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import generate

ROOT = Path(__file__).parents[1]


ELSEWHERE = re.compile(r"(?:src|href)=\"(?:https?:)?//[^\"]*(?:font|cdn|unpkg)")


def main() -> int:
    """Write the pages that are not in git, then build. Returns the exit status."""
    generate.write_untracked()
    remote = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True).stdout
    environment = {"REPOSITORY": web_address(remote), **os.environ}
    build = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT, env=environment
    )
    return build.returncode or check(ROOT / "site")


def web_address(remote: str) -> str:
    """The page of a remote repository, without what stands for a user in its address; empty if it is a folder.

    Example:
        >>> web_address("git@github.com:owner/name.git"), web_address("https://user:key@host.org/owner/name")
        ('https://github.com/owner/name', 'https://host.org/owner/name')
    """
    found = re.search(r"(?:@|//)(?:[^@/]*@)?([\w.-]+)[:/](\S+?)(?:\.git)?\s*$", remote)
    return f"https://{found[1]}/{found[2]}" if found else ""


def check(site: Path) -> int:
    """Print what is wrong with the pages of a built site, one line each. Returns how much there is, at most 1."""
    found = []
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        if "|---|" in text:
            found.append(f"{page}: a table that was not understood")
        if elsewhere := ELSEWHERE.search(text):
            found.append(f"{page}: loads from elsewhere: {elsewhere[0]}")
    found += [f"{path}: no page needs it" for path in sorted(site.rglob("*.py*"))]
    print(*found, sep="\n", end="\n" if found else "")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
