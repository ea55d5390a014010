"""Tests that older libraries cannot pass, and why: `make test-oldest` skips them with the reason.

What is left out concerns an option or a model of the library that its older version does not have, or has wrong by
itself, in the dense model. Everything else runs.
"""

from __future__ import annotations

from vitrim.core.versions import is_older

TESTS: tuple[tuple[str, str, str, str], ...] = (
    ("timm", "1.0.31", "padded patches end in an error of timm's own", "timm/test_naflex_padding.py"),
    ("timm", "1.0.31", "mixed tables are float32 whatever the model is", "test_timm_positions.py::*[mixed_patch_drop]"),
    ("timm", "1.0.31", "EfficientViM is not there", "test_the_head_of_any_model_of_a_library_is_new[timm several]"),
    ("timm", "1.0.30", "queries are not grouped", "parts_of_the_projection_are_those_of_the_whole[eva_grouped"),
    ("timm", "1.0.30", "encoders of language models are not there", "timm/test_timm_encoders.py"),
    ("timm", "1.0.26", "Eva takes no attn_mask", "test_timm_families.py::test_a_mask_is_refused"),
    ("timm", "1.0.25", "bias=False is refused in parallel blocks", "test_models_by_name[vit_base_patch16_xp_224]"),
    ("timm", "1.0.23", "there is no differential attention", "test_differential_attention_is_refused"),
    ("timm", "1.0.23", "there is no differential attention", "test_blocks_and_attention_of_other_classes_are_refused"),
    ("transformers", "5.9", "LW-DETR is refused", "transformers/test_hf_detr.py"),
    ("transformers", "5.9", "parts have other names", "test_hf_matches_timm.py::test_logits_and_tokens_agree"),
    ("transformers", "5.9", "parts have other names", "test_an_attention_map_is_what_the_layer_attends_by"),
    ("transformers", "5.18", "parts have other names", "test_adapters_in_the_place_of_projections_are_used"),
    ("transformers", "5.6", "its hidden states are refused", "test_hidden_states_of_pruned_tokens_are_zero[hf_siglip]"),
    (
        "transformers",
        "5.6",
        "reads its own config",
        "maps_are_those_of_the_dense_model_where_nothing_is_reduced[hf_siglip]",
    ),
    ("transformers", "5.9", "BEiT is refused", "test_hf_*[hf_beit]"),
    ("transformers", "5.9", "BEiT is refused", "test_masked_images_are_refused_by_the_reduced_part[BeitFor"),
    (
        "transformers",
        "5.9",
        "a list of layers is no wish",
        "test_hidden_states_cover_the_full_grid_however_they_are_asked_for",
    ),
    ("transformers", "5.13", "C-RADIO is not there", "transformers/test_hf_radio.py"),
    ("transformers", "5.18", "whole vision-language models are refused", "hosts/test_compact.py"),
    ("transformers", "5.18", "whole vision-language models are refused", "hosts/test_compact_connectors.py"),
    ("transformers", "5.18", "whole vision-language models are refused", "hosts/test_selecting.py"),
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


def has_host(name: str) -> bool:
    """True if the installed libraries have what a tiny host is made of."""
    return name not in HOSTS or not is_older(*HOSTS[name])
