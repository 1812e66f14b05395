"""Sixty more architectures, as PyTorch's own suite for compile backends has them.

None is in zoo.py, by whose means they are built: small, from configurations, with random weights.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from zoo import (
    BLOCK,
    DEEP,
    GROUPED,
    IMAGE,
    MLP,
    SIDES,
    TOKENS,
    VOCABULARY,
    WAVES,
    Built,
    Inputs,
    Zoo,
    entry,
    timm,
    tokens,
    transformers,
)

ARCHITECTURES: Zoo = {}


def model(name: str, kind: str, config: str, inputs: Callable[[], Inputs], **options: Any) -> None:
    """Add a model of transformers: the class `kind` of the configuration `config`."""
    transformers("transformers", name, kind, config, inputs, zoo=ARCHITECTURES, **options)


def text() -> Inputs:
    return {"input_ids": tokens()}


def both() -> Inputs:
    return {"input_ids": tokens(), "decoder_input_ids": tokens()}


def language(name: str, prefix: str, kind: str = "ForCausalLM", **options: Any) -> None:
    """Add a model of tokens."""
    options = {**TOKENS, **options}
    model(name, prefix + kind, prefix + "Config", text, **options)


def pair(name: str, prefix: str, **options: Any) -> None:
    """Add an encoder and a decoder."""
    options = {**TOKENS, "d_model": 64, "decoder_start_token_id": 1, **options}
    model(name, f"{prefix}ForConditionalGeneration", f"{prefix}Config", both, **options)


def image(name: str, kind: str, config: str, side: int = 64, **options: Any) -> None:
    """Add a model of images."""
    model(name, kind, config, lambda: {"pixel_values": torch.randn(2, 3, side, side)}, **options)


language("XLNet", "XLNet", "LMHeadModel", d_model=64, n_layer=2, n_head=4, d_inner=128)
language(
    *("MobileBERT", "MobileBert", "ForMaskedLM"),
    **{**BLOCK, "embedding_size": 32, "intra_bottleneck_size": 32, "num_feedforward_networks": 2},
    normalization_type="layer_norm",
)
language("ConvBERT", "ConvBert", "ForMaskedLM", **BLOCK, embedding_size=64)
language("FNet", "FNet", "ForMaskedLM", **MLP, **DEEP, hidden_size=64)
language("Longformer", "Longformer", "ForMaskedLM", **BLOCK, attention_window=4)
language("BigBird", "BigBird", "ForMaskedLM", **BLOCK, attention_type="original_full")
language("LayoutLM", "LayoutLM", "ForMaskedLM", **BLOCK)
language("MPNet", "MPNet", "ForMaskedLM", **BLOCK)
language(
    *("Funnel", "Funnel", "ForMaskedLM"),
    **{"d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128, "block_sizes": [1, 1]},
)
language("RoFormer", "RoFormer", "ForMaskedLM", **BLOCK, embedding_size=64)
language("XLM", "XLM", "WithLMHeadModel", emb_dim=64, n_layers=2, n_heads=4, n_words=VOCABULARY)
pair("Blenderbot", "Blenderbot", **SIDES)
pair("Pegasus", "Pegasus", **SIDES)
pair("mBART", "MBart", **SIDES)
pair("LED", "LED", **SIDES, attention_window=4)
T5 = {"d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
pair("MT5", "MT5", **T5)
pair("Switch", "SwitchTransformers", **T5, num_experts=2)
language("XGLM", "XGLM", d_model=64, ffn_dim=128, num_layers=2, attention_heads=4)
language("BioGPT", "BioGpt", **BLOCK)
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
language(
    *("Qwen3-MoE", "Qwen3Moe"),
    **{**BLOCK, **GROUPED, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 32},
)
language("OLMoE", "Olmoe", **BLOCK, num_experts=4, num_experts_per_tok=2)
language("GPT-OSS", "GptOss", **BLOCK, **GROUPED, **EXPERTS, num_local_experts=4)
language("Cohere2", "Cohere2", **BLOCK, **GROUPED)
language("DiffLlama", "DiffLlama", **BLOCK, **GROUPED)
language(
    *("Mamba-2", "Mamba2"),
    **{**DEEP, "hidden_size": 64, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2},
)
language("LFM2", "Lfm2", **BLOCK, **GROUPED, full_attn_idxs=[1], block_multiple_of=32)
language(
    *("RecurrentGemma", "RecurrentGemma"),
    **{**BLOCK, "num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 8},
    **{"num_key_value_heads": 1, "head_dim": 16},
)
for _name, _prefix in [("HuBERT", "Hubert"), ("WavLM", "WavLM")]:
    model(
        *(_name, f"{_prefix}ForCTC", f"{_prefix}Config"),
        lambda: {"input_values": torch.randn(1, 8000)},
        **WAVES,
    )
model(
    *("AST", "ASTForAudioClassification", "ASTConfig"),
    lambda: {"input_values": torch.randn(2, 32, 16)},
    **{**BLOCK, "max_length": 32, "num_mel_bins": 16, "patch_size": 8},
)
image(
    *("DPT", "DPTForDepthEstimation", "DPTConfig"),
    **{**IMAGE, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    **{"neck_hidden_sizes": [16, 16, 32, 32], "fusion_hidden_size": 16, "is_hybrid": False},
)
image(
    *("YOLOS", "YolosForObjectDetection", "YolosConfig"),
    **{**IMAGE, "image_size": [64, 64], "num_detection_tokens": 5},
)
image("BLIP", "BlipVisionModel", "BlipVisionConfig", **IMAGE)
image(
    *("Swin2SR", "Swin2SRForImageSuperResolution", "Swin2SRConfig", 32),
    **{"image_size": 32, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
)
model(
    *("PatchTST", "PatchTSTForPrediction", "PatchTSTConfig"),
    lambda: {"past_values": torch.randn(2, 32, 2)},
    **{"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8},
    **{**DEEP, "prediction_length": 8, "d_model": 32, "num_attention_heads": 4, "ffn_dim": 64},
)


def torchvision(name: str, maker: str, shape: tuple[int, ...]) -> None:
    """Add a model of torchvision: the function `maker` of torchvision.models."""

    @entry(name, "torchvision", ARCHITECTURES)
    def build(deep: bool) -> Built:
        import torchvision.models

        make = operator.attrgetter(maker)(torchvision.models)
        return make(weights=None), (torch.randn(shape),)


for _name, _model, _side in [
    ("CoaT", "coat_lite_tiny", 224),
    ("ConViT", "convit_tiny", 224),
    ("MobileViT", "mobilevit_xxs", 64),
    ("PiT", "pit_ti_224", 224),
    ("TNT", "tnt_s_patch16_224", 224),
    ("VOLO", "volo_d1_224", 224),
    ("gMLP", "gmlp_ti16_224", 224),
    ("ResMLP", "resmlp_12_224", 224),
    ("NesT", "nest_tiny", 224),
    ("PoolFormer v2", "poolformerv2_s12", 64),
    ("CAFormer", "caformer_s18", 64),
    ("EdgeNeXt", "edgenext_xx_small", 64),
    ("FocalNet", "focalnet_tiny_srf", 64),
    ("GC ViT", "gcvit_xxtiny", 224),
    ("DaViT", "davit_tiny", 64),
    ("MViT v2", "mvitv2_tiny", 224),
    ("Sequencer2D", "sequencer2d_s", 224),
    ("CoAtNet", "coatnet_nano_rw_224", 224),
    ("TinyViT", "tiny_vit_5m_224", 224),
    ("NaFlexViT", "naflexvit_base_patch16_gap", 64),
]:
    timm(_name, _model, _side, zoo=ARCHITECTURES)


torchvision("torchvision ConvNeXt", "convnext_tiny", (1, 3, 64, 64))
torchvision("torchvision MaxViT", "maxvit_t", (2, 3, 224, 224))
torchvision("torchvision Swin V2", "swin_v2_t", (1, 3, 64, 64))
torchvision("torchvision Swin 3D", "video.swin3d_t", (1, 3, 4, 64, 64))
torchvision("torchvision ResNet-18", "resnet18", (2, 3, 64, 64))
