"""Tests that older libraries cannot pass, and why: `make test-oldest` skips them with the reason.

What is left out concerns an option or a model of the library that its older version does not have, or has wrong by
itself, in the dense model. A test in which vitrim refuses something by name and version is skipped, too, if the
installed version is older indeed. Everything else runs.
"""

from __future__ import annotations

import re
from importlib.metadata import version

from packaging.version import Version

from vitrim.core.versions import is_older

TESTS: tuple[tuple[str, str, str, str], ...] = (
    ("timm", "1.0.31", "padded patches end in an error of timm's own", "timm/test_naflex_padding.py"),
    ("timm", "1.0.31", "mixed tables are float32 whatever the model is", "test_timm_positions.py::*[mixed_patch_drop]"),
    ("timm", "1.0.31", "forward takes no is_causal", "test_timm_families.py::test_a_mask_is_refused[vit]"),
    ("timm", "1.0.31", "EfficientViM is not there", "test_the_head_of_any_model_of_a_library_is_new[timm several]"),
    ("timm", "1.0.30", "queries are not grouped", "parts_of_the_projection_are_those_of_the_whole[eva_grouped"),
    ("timm", "1.0.30", "encoders of language models are not there", "timm/test_timm_encoders.py"),
    ("timm", "1.0.26", "Eva takes no attn_mask", "test_timm_families.py::test_a_mask_is_refused"),
    ("timm", "1.0.26", "Eva takes no attn_mask", "test_pruning_before_the_first_block_equals_masking_*[eva"),
    ("timm", "1.0.23", "there is no differential attention", "test_differential_attention_is_refused"),
    ("typer", "0.29", "click 8.5 takes away the help of arguments", "test_no_argument_is_hidden_and_every_option_says"),
    ("transformers", "5.9", "LW-DETR is refused", "transformers/test_hf_detr.py"),
    ("transformers", "5.9", "parts have other names", "test_hf_matches_timm.py::test_logits_and_tokens_agree"),
    ("transformers", "5.9", "parts have other names", "test_an_attention_map_is_what_the_layer_attends_by"),
    ("transformers", "5.18", "parts have other names", "test_adapters_in_the_place_of_projections_are_used"),
    (
        "transformers",
        "5.6",
        "reads its own config",
        "maps_are_those_of_the_dense_model_where_nothing_is_reduced[hf_siglip]",
    ),
    ("transformers", "5.9", "parts have other names", "test_another_attention_class_is_refused"),
    ("transformers", "5.17", "towers give one tensor", "test_qwen_towers.py::test_merging_equal_cells_changes_nothing"),
    ("transformers", "5.13", "scores of pixels are not handed out", "test_classes_of_pixels_are_those_of_the_library"),
    ("transformers", "5.9", "the text tower's output is projected in place", "test_the_text_tower_stays_as_it_is"),
    (
        "transformers",
        "5.18",
        "mid positions lie elsewhere",
        "test_pruned_tokens_leave_the_others_their_own_mid",
    ),
    ("transformers", "5.18", "mid positions lie elsewhere", "test_the_library_computes_its_loss_on_the_reduced_model"),
    ("transformers", "5.20", "Molmo 2 is not there", "[molmo2"),
    ("transformers", "5.9", "made for all hosts", "test_the_covering_array_has_every_method_every_host_and_most_pairs"),
    ("transformers", "5.13", "C-RADIO is not there", "transformers/test_hf_radio.py"),
    ("transformers", "5.18", "whole vision-language models are refused", "hosts/test_compact.py"),
    ("transformers", "5.18", "whole vision-language models are refused", "hosts/test_compact_connectors.py"),
    ("transformers", "5.18", "whole vision-language models are refused", "hosts/test_selecting.py"),
    ("transformers", "5.18", "whole vision-language models are refused", "test_families_in_cells_and_compact_ones_are"),
)
"""A package, the version with which the tests pass, the reason, and what their names contain: * is anything."""
HOSTS: dict[str, tuple[str, str]] = {
    "parallel_fused_out": ("timm", "1.0.25"),  # before, parallel blocks without a bias of q, k, v are refused
    "eva_grouped": ("timm", "1.0.30"),
    "eva_rope_mixed": ("timm", "1.0.30"),
    "lv_vit_narrow_heads": ("timm", "1.0.23"),
}
"""Tiny hosts that need an option of a newer library."""


def left_out() -> list[tuple[str, str]]:
    """What names of tests contain (``*`` stands for anything), and why they are left out."""
    return [
        (name, f"needs {package} {version}: {reason}")
        for package, version, reason, name in TESTS
        if is_older(package, version)
    ]


def refusal(error: BaseException) -> str | None:
    """What is refused by name and version in the message of an ``error``, if the installed version is older indeed."""
    found = re.search(r"[^\n'\"]* needs (timm|transformers) ([\d.]+\d) or newer, and [\d.]+ is installed", str(error))
    return found[0] if found and Version(version(found[1])) < Version(found[2]) else None


def has_host(name: str) -> bool:
    """True if the installed libraries have what a tiny host is made of."""
    return name not in HOSTS or not is_older(*HOSTS[name])
