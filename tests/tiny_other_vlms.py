"""Tiny vision-language models whose towers stay as they are: image tokens are selected behind them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

import tiny
from tiny_hosts.common import seeded
from tiny_vlms import IDS, IMAGE, LLAMA, QWEN_MERGED, ROPE, TEXT, VISION, VLM, nested, packed, sized

QWEN2 = transformers.Qwen2Config(**TEXT)


def qwen2_5_vl() -> nn.Module:
    vision = {
        **QWEN_MERGED,
        "window_size": 16,
        "fullatt_block_indexes": [1, 3],
    }
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE}, **IDS)
    )


def qwen3_vl_moe() -> nn.Module:
    vision = {
        **QWEN_MERGED,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    text = {**TEXT, **experts, "mlp_only_layers": [], "rope_parameters": ROPE}
    return transformers.Qwen3VLMoeForConditionalGeneration(
        transformers.Qwen3VLMoeConfig(vision_config=vision, text_config=text, **IDS)
    )


def qwen3_5() -> nn.Module:
    vision = {
        **QWEN_MERGED,
        "num_position_embeddings": 36,
    }
    linear = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
    }
    rope = {**ROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    return transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(vision_config=vision, text_config={**TEXT, **linear, "rope_parameters": rope}, **IDS)
    )


def glm4v(name: str = "Glm4v") -> nn.Module:
    vision = {
        **QWEN_MERGED,
        "image_size": 24,
    }
    ids = {"image_token_id": IMAGE, "video_token_id": 3, "image_start_token_id": 4, "image_end_token_id": 5}
    ids |= {"video_start_token_id": 6, "video_end_token_id": 8}
    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    config = transformers.Glm4vConfig(vision_config=vision, text_config={**text, "rope_parameters": ROPE}, **ids)
    if name == "Glm46V":
        config = transformers.Glm46VConfig(vision_config=config.vision_config, text_config=config.text_config, **ids)
    if name == "GlmOcr":
        config = transformers.GlmOcrConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE}, **ids)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)  # type: ignore[no-any-return]


def paddleocr_vl() -> nn.Module:
    vision = {**VISION, "spatial_merge_size": 2, "image_size": 24, "patch_size": 4}
    return transformers.PaddleOCRVLForConditionalGeneration(
        transformers.PaddleOCRVLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE}, **IDS)
    )


def llava_next() -> nn.Module:
    return transformers.LlavaNextForConditionalGeneration(
        transformers.LlavaNextConfig(
            vision_config=transformers.CLIPVisionConfig(**VISION),
            text_config=LLAMA,
            image_token_id=IMAGE,
            image_grid_pinpoints=[[24, 48], [48, 24], [48, 48]],
        )
    )


def llava_onevision() -> nn.Module:
    return transformers.LlavaOnevisionForConditionalGeneration(
        transformers.LlavaOnevisionConfig(
            vision_config=transformers.SiglipVisionConfig(**VISION),
            text_config=QWEN2,
            image_token_id=IMAGE,
            video_token_id=3,
            image_grid_pinpoints=[[24, 48], [48, 24], [48, 48]],
        )
    )


def mistral3() -> nn.Module:
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(
            vision_config=transformers.PixtralVisionConfig(**VISION),
            text_config=transformers.MistralConfig(**TEXT),
            image_token_id=IMAGE,
            spatial_merge_size=2,
            vision_feature_layer=-1,
        )
    )


def gemma3n() -> nn.Module:
    text = transformers.Gemma3nTextConfig(
        **TEXT,
        vocab_size_per_layer_input=60,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        altup_num_inputs=2,
        laurel_rank=4,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        activation_sparsity_pattern=[0.0, 0.0],
    )
    vision = transformers.Gemma3nVisionConfig(
        architecture="test_byobnet", hidden_size=256, vocab_size=8, vocab_offset=60
    )
    return transformers.Gemma3nForConditionalGeneration(
        transformers.Gemma3nConfig(
            text_config=text,
            vision_config=vision,
            audio_config=transformers.Gemma3nAudioConfig(hidden_size=16, conf_num_hidden_layers=1, vocab_offset=68),
            image_token_id=IMAGE,
            vision_soft_tokens_per_image=16,
        )
    )


GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}


def gemma4() -> nn.Module:
    text = transformers.Gemma4TextConfig(
        **TEXT,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=60,
        hidden_size_per_layer_input=8,
        global_head_dim=8,
    )
    vision = transformers.Gemma4VisionConfig(**GEMMA4_VISION, patch_size=4)
    return transformers.Gemma4ForConditionalGeneration(
        transformers.Gemma4Config(
            text_config=text,
            vision_config=vision,
            audio_config=None,
            image_token_id=IMAGE,
            video_token_id=3,
            audio_token_id=6,
        )
    )


def llama4() -> nn.Module:
    vision = {
        **VISION,
        "image_size": 24,
        "patch_size": 4,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
        "pixel_shuffle_ratio": 0.5,
        "intermediate_size": 128,
    }
    text = {
        **TEXT,
        "intermediate_size_mlp": 32,
        "num_local_experts": 2,
        "layer_types": ["full_attention", "full_attention"],
        "no_rope_layers": [1, 1],
    }
    return transformers.Llama4ForConditionalGeneration(
        transformers.Llama4Config(vision_config=vision, text_config=text, image_token_index=IMAGE)
    )


def idefics2() -> nn.Module:
    vision = {**VISION, "image_size": 24, "patch_size": 4}
    perceiver = {
        "hidden_size": 16,
        "resampler_n_latents": 6,
        "resampler_depth": 1,
        "resampler_n_heads": 2,
        "resampler_head_dim": 8,
        "num_key_value_heads": 2,
    }
    return transformers.Idefics2ForConditionalGeneration(
        transformers.Idefics2Config(
            vision_config=vision,
            perceiver_config=perceiver,
            text_config=transformers.MistralConfig(**TEXT),
            image_token_id=IMAGE,
        )
    )


def got_ocr2() -> nn.Module:
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "mlp_dim": 64,
        "image_size": 64,
        "patch_size": 4,
        "output_channels": 8,
        "window_size": 4,
        "global_attn_indexes": [1],
    }
    return transformers.GotOcr2ForConditionalGeneration(
        transformers.GotOcr2Config(vision_config=vision, text_config=QWEN2, image_token_id=IMAGE)
    )


def janus() -> nn.Module:
    vision = {**VISION, "image_size": 24, "patch_size": 4, "projection_dim": 16, "num_image_tokens": 36}
    vq = {"base_channels": 32, "projection_dim": 16, "image_token_embed_dim": 16, "num_embeddings": 8, "num_patches": 2}
    return transformers.JanusForConditionalGeneration(
        transformers.JanusConfig(vision_config=vision, vq_config=vq, text_config=LLAMA, image_token_id=IMAGE)
    )


def aria() -> nn.Module:
    text = transformers.AriaTextConfig(**TEXT, moe_num_experts=2, moe_topk=1, moe_num_shared_experts=1)
    return transformers.AriaForConditionalGeneration(
        transformers.AriaConfig(
            vision_config=transformers.Idefics3VisionConfig(**VISION)
            if hasattr(transformers, "Idefics3VisionConfig")
            else None,
            text_config=text,
            image_token_id=IMAGE,
            image_token_index=IMAGE,
            projector_patch_to_query_dict={36: 9},
            vision_feature_layer=-1,
        )
    )


def ovis2() -> nn.Module:
    vision = {
        **VISION,
        "image_size": 24,
        "patch_size": 4,
        "vocab_size": 20,
        "hidden_stride": 2,
        "num_visual_indicator_tokens": 5,
    }
    return transformers.Ovis2ForConditionalGeneration(
        transformers.Ovis2Config(
            vision_config=vision,
            text_config=QWEN2,
            image_token_id=IMAGE,
            visual_indicator_token_ids=[40, 41, 42, 43, 44],
            vocab_size=60,
            hidden_size=16,
        )
    )


def perception_lm() -> nn.Module:
    vision = transformers.TimmWrapperConfig(
        architecture="test_vit", num_labels=0, model_args={"img_size": 32, "embed_dim": 32, "global_pool": ""}
    )
    return transformers.PerceptionLMForConditionalGeneration(
        transformers.PerceptionLMConfig(vision_config=vision, text_config=LLAMA, image_token_id=IMAGE, video_token_id=3)
    )


def blip2(name: str = "Blip2") -> nn.Module:
    vision = {**VISION, "image_size": 24, "patch_size": 4}
    qformer = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 60,
        "encoder_hidden_size": 32,
    }
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        qformer_config=qformer,
        text_config=LLAMA,
        num_query_tokens=6,
        image_token_id=IMAGE,
        image_token_index=IMAGE,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def aya_vision() -> nn.Module:
    return transformers.AyaVisionForConditionalGeneration(
        transformers.AyaVisionConfig(
            vision_config=transformers.SiglipVisionConfig(**VISION),
            text_config=LLAMA,
            image_token_id=IMAGE,
            downsample_factor=2,
            vision_feature_layer=-1,
        )
    )


def cohere2_vision() -> nn.Module:
    return transformers.Cohere2VisionForConditionalGeneration(
        transformers.Cohere2VisionConfig(
            vision_config=transformers.SiglipVisionConfig(**VISION),
            text_config=LLAMA,
            image_token_id=IMAGE,
            downsample_factor=2,
            alignment_intermediate_size=32,
        )
    )


def kimi_k25() -> nn.Module:
    own = {key: value for key, value in TEXT.items() if key != "head_dim"}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    ranks = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    text = transformers.DeepseekV3Config(**own, **experts, **ranks, moe_intermediate_size=16, first_k_dense_replace=1)
    places = {"pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 4}
    vision = {**{key: VISION[key] for key in ("hidden_size", "num_attention_heads", "intermediate_size")}, **places}
    return transformers.Kimi_K25ForConditionalGeneration(
        transformers.Kimi_K25Config(
            text_config=text,
            vision_config={**vision, "num_hidden_layers": 2, "patch_size": 4},
            projection_hidden_size=32,
            image_token_id=IMAGE,
            video_token_id=3,
        )
    )


def minicpmv4_6() -> nn.Module:
    vision = {**VISION, "num_hidden_layers": 2, "image_size": 32, "patch_size": 4, "insert_layer_id": 1}
    return transformers.MiniCPMV4_6ForConditionalGeneration(
        transformers.MiniCPMV4_6Config(
            text_config=QWEN2,
            vision_config=vision,
            insert_layer_id=1,
            image_size=32,
            image_token_id=IMAGE,
            video_token_id=3,
        )
    )


def molmo2() -> nn.Module:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 32}
    vision = {
        **heads,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "image_size": [24, 24],
        "patch_size": 4,
        "num_position_embeddings": 36,
    }
    adapter = {**heads, "vision_feature_layer": [-1, 0], "intermediate_size": 32, "text_hidden_size": 16}
    return transformers.Molmo2ForConditionalGeneration(
        transformers.Molmo2Config(
            vision_config=vision,
            adapter_config=adapter,
            text_config={**TEXT, "additional_vocab_size": 8},
            image_patch_id=IMAGE,
            image_start_token_id=60,
            image_end_token_id=61,
        )
    )


def tiles(rows: list[int]) -> dict[str, Tensor]:
    """LLaVA-NeXT's form: two tiles and the whole image, of images of 24 x 48 pixels."""
    number = sum(rows)
    pixels = tiny.images(3 * number).view(number, 3, 3, 24, 24)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[24, 48]] * number)}


def sized_as(side: int) -> Callable[[list[int]], dict[str, Tensor]]:
    """Images of ``side`` pixels."""

    def images(rows: list[int]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        return {"pixel_values": torch.randn(sum(rows), 3, side, side, generator=generator)}

    return images


def clips(rows: list[int]) -> dict[str, Tensor]:
    """Perception LM's form: images of one tile."""
    return {"pixel_values": sized_as(32)(rows)["pixel_values"].unsqueeze(1)}


def patches(rows: list[int]) -> dict[str, Tensor]:
    """PaddleOCR's form: as Qwen's, with patches of pixels."""
    given = packed(rows)
    own = given["pixel_values"][:, : 3 * 4 * 4].reshape(-1, 3, 4, 4)
    return {**given, "pixel_values": own}


def located(rows: list[int]) -> dict[str, Tensor]:
    """Gemma 4's form: patches with their places."""
    number = sum(rows)
    places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), -1).view(1, 36, 2)
    pixels = torch.rand(number, 36, 48, generator=torch.Generator().manual_seed(3))
    return {"pixel_values": pixels, "image_position_ids": places.expand(number, -1, -1)}


def asked(rows: list[int]) -> dict[str, Tensor]:
    """InstructBLIP's form: the queries read a text, too."""
    return {"pixel_values": tiny.images(sum(rows)), "qformer_input_ids": torch.tensor([[7, 8, 9]] * sum(rows))}


def striped(rows: list[int]) -> dict[str, Tensor]:
    """MiniCPM-V's form: the patches of all images in one stripe."""
    number = sum(rows)
    pixels = torch.randn(1, 3, 4, 4 * 64 * number, generator=torch.Generator().manual_seed(3))
    return {"pixel_values": pixels, "target_sizes": torch.tensor([[8, 8]] * number)}


def gathered(rows: list[int]) -> dict[str, Tensor]:
    """Molmo's form: which patches each token is made of."""
    number = sum(rows)
    cells = torch.arange(36).view(3, 2, 3, 2).permute(0, 2, 1, 3).reshape(9, 4)
    pixels = torch.randn(number, 36, 48, generator=torch.Generator().manual_seed(3))
    pooling = torch.cat([cells + 36 * image for image in range(number)])
    return {
        "pixel_values": pixels,
        "image_token_pooling": pooling,
        "image_grids": torch.tensor([[3, 3, 0, 0]] * number),
    }


OTHERS: dict[str, VLM] = {
    "qwen2_5_vl": VLM(seeded(qwen2_5_vl), 9, images=packed, types="mm_token_type_ids"),
    "qwen3_vl_moe": VLM(seeded(qwen3_vl_moe), 9, images=packed, types="mm_token_type_ids"),
    "qwen3_5": VLM(seeded(qwen3_5), 9, images=packed, types="mm_token_type_ids"),
    "gemma3n": VLM(seeded(gemma3n), 16, images=sized_as(128)),
    "gemma4": VLM(seeded(gemma4), 9, images=located, types="mm_token_type_ids"),
    "llama4": VLM(seeded(llama4), 9),
    "glm4v": VLM(seeded(glm4v), 9, images=packed, types="mm_token_type_ids"),
    "glm46v": VLM(seeded(lambda: glm4v("Glm46V")), 9, images=packed, types="mm_token_type_ids"),
    "glm_ocr": VLM(seeded(lambda: glm4v("GlmOcr")), 9, images=packed, types="mm_token_type_ids"),
    "minicpmv4_6": VLM(seeded(minicpmv4_6), 4, images=striped),
    "molmo2": VLM(seeded(molmo2), 9, images=gathered),
    "kimi_k25": VLM(seeded(kimi_k25), 9, images=patches),
    "ovis2": VLM(seeded(ovis2), 9),
    "idefics2": VLM(seeded(idefics2), 6, images=nested),
    "paddleocr_vl": VLM(seeded(paddleocr_vl), 9, images=patches, types="mm_token_type_ids"),
    "got_ocr2": VLM(seeded(got_ocr2), 16, images=sized_as(64)),
    "janus": VLM(seeded(janus), 36),
    "instructblip": VLM(seeded(lambda: blip2("InstructBlip")), 6, images=asked),
    "blip2": VLM(seeded(blip2), 6),
    "aria": VLM(seeded(aria), 9),
    "perception_lm": VLM(seeded(perception_lm), 4, images=clips),
    "llava_next": VLM(seeded(llava_next), 114, images=tiles),
    "llava_onevision": VLM(seeded(llava_onevision), 114, images=tiles),
    "mistral3": VLM(seeded(mistral3), 9, images=sized),
    "aya_vision": VLM(seeded(aya_vision), 9),
    "cohere2_vision": VLM(seeded(cohere2_vision), 9),
}
SMALLER = dict.fromkeys(
    ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "glm46v", "glm_ocr", "paddleocr_vl", "mistral3", "kimi_k25"), 6
)
"""Image tokens of every second image, where it is smaller."""
