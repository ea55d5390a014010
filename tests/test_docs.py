"""What pages must say."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_pruned_patches_are_said_to_be_zeros() -> None:
    for page in ("README.md", "docs/hosts.md", "docs/architecture.md"):
        assert "zeros" in (ROOT / page).read_text(), page
