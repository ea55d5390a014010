"""What a host library calls its parts stands in ``hosts/`` and ``models/`` alone; others ask (`core/registry.py`)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import vitrim

SOURCE = Path(vitrim.__file__).parent
ROOMS_OF_HOSTS = ("hosts", "models", "serving")

TELLING = (
    *("reset_classifier", "get_classifier", "set_grad_checkpointing", "gradient_checkpointing_", "group_matcher"),
    *("no_weight_decay", "pretrained_cfg", "forward_features", "forward_head", "num_labels", "_name_or_path"),
    *(r"\bpos_embed", "pos_embedding", "position_embedding", "patch_embed", "cls_token"),
    *("head_dist", "aux_head", "auxiliary_head", "conv_proj", "patch_drop_rate"),
    *("in_chans", "image_size", "vision_config", "AutoImageProcessor", "hf:", "VisionTransformer"),
    *(r"(from|import) timm\.models", r"(from|import) transformers", r"(from|import) torchvision\.models"),
)
"""Patterns of names that only one who knows a library writes. (``img_size`` is our word, too: ``--img-size``.)"""

ALLOWED = {
    "core/library.py": {"image_size"},  # what a user's own model may say, by our word: `Library.preprocessing`
    # creates models: options, prefixes, and where the weights of a name are
    "loading.py": {"hf:", "num_labels", "in_chans", "image_size", "pretrained_cfg"},
    "analysis/families/throughput.py": {"image_size"},  # imports core/image_size.py
    "app/digits.py": {
        "VisionTransformer",
        "in_chans",
        r"(from|import) timm\.models",
    },  # makes the demo's own model
    "cli/options.py": {"hf:"},  # help texts: how a model and its options are written
    "training/recipe.py": {"hf:", "patch_drop_rate"},  # descriptions of keys, likewise
    "training/checks.py": {"patch_drop_rate"},  # says which option a recipe needs
}
"""Which files may use which, and why."""


def code_of(path: Path) -> str:
    """The file without docstrings and comments: those may explain and show examples."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [line for line in node.body if not _is_text(line)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


def test_names_of_host_libraries_stay_with_the_hosts() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        where = path.relative_to(SOURCE)
        if where.parts[0] not in ROOMS_OF_HOSTS:
            code = code_of(path)
            names = {name for name in TELLING if re.search(name, code)}
            if names:
                found[where.as_posix()] = names
    # equal, not a subset: what is no longer needed is no longer allowed
    assert found == ALLOWED
