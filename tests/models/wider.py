"""Architectures beyond those of zoo.py and architectures.py, which the census counts as well."""

from __future__ import annotations

from typing import Any

import torch
from zoo import (
    BLOCK,
    DEEP,
    GPT,
    GROUPED,
    HEADS,
    IMAGE,
    SIDES,
    STEPS,
    TOKENS,
    VOCABULARY,
    WAVES,
    WIDTH,
    Built,
    Zoo,
    diffusers,
    entry,
    noise,
    timm,
    tokens,
    transformers,
)

WIDER: Zoo = {}


def language(name: str, kind: str, config: str | None = None, **options: Any) -> None:
    """Add a model of tokens: the class `kind` of transformers."""
    config = config or f"{kind.partition('For')[0]}Config"
    transformers(
        *("transformers", name, kind, config),
        lambda: {"input_ids": tokens()},
        zoo=WIDER,
        **{**TOKENS, **options},
    )


def pair(name: str, prefix: str, **options: Any) -> None:
    """Add an encoder and a decoder of transformers."""
    transformers(
        *("transformers", name, f"{prefix}ForConditionalGeneration", f"{prefix}Config"),
        lambda: {"input_ids": tokens(), "decoder_input_ids": tokens()},
        zoo=WIDER,
        **{**TOKENS, "d_model": 64, "decoder_start_token_id": 1, **options},
    )


def image(name: str, kind: str, config: str, side: int = 64, **options: Any) -> None:
    """Add a model of images of transformers."""
    transformers(
        *("transformers", name, kind, config),
        lambda: {"pixel_values": torch.randn(2, 3, side, side)},
        zoo=WIDER,
        **options,
    )


def sound(name: str, kind: str, config: str, **options: Any) -> None:
    """Add a model of waves of transformers."""
    transformers(
        *("transformers", name, kind, config),
        lambda: {"input_values": torch.randn(1, 8000)},
        zoo=WIDER,
        **{**WAVES, **options},
    )


LLAMA = {**BLOCK, **GROUPED, "head_dim": 16}
for _name, _prefix in [
    *(("OLMo-3", "Olmo3"), ("GLM-4-0414", "Glm4"), ("Helium", "Helium"), ("Arcee", "Arcee")),
    *(("EXAONE 4", "Exaone4"), ("Seed-OSS", "SeedOss"), ("Apertus", "Apertus")),
    *(("ERNIE 4.5", "Ernie4_5"), ("Hunyuan", "HunYuanDenseV1"), ("BitNet", "BitNet")),
    *(("Ministral", "Ministral"), ("VaultGemma", "VaultGemma"), ("Qwen3-Next", "Qwen3Next")),
]:
    language(_name, f"{_prefix}ForCausalLM", **LLAMA)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4}
language(
    *("Qwen2-MoE", "Qwen2MoeForCausalLM"),
    **{**LLAMA, **EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
)
language("Phi-3.5-MoE", "PhimoeForCausalLM", **BLOCK, **GROUPED, **EXPERTS)
language("Granite MoE", "GraniteMoeForCausalLM", **BLOCK, **GROUPED, **EXPERTS)
language("Falcon Mamba", "FalconMambaForCausalLM", **DEEP, hidden_size=64, state_size=8)
language("OpenAI GPT", "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", **GPT)
language("ModernBERT decoder", "ModernBertDecoderForCausalLM", **BLOCK)
for _name, _kind in [
    *(("XLM-RoBERTa", "XLMRobertaForMaskedLM"), ("XLM-RoBERTa XL", "XLMRobertaXLForMaskedLM")),
    *(("CamemBERT", "CamembertForMaskedLM"), ("Megatron BERT", "MegatronBertForMaskedLM")),
    *(("ERNIE", "ErnieForMaskedLM"), ("RemBERT", "RemBertForMaskedLM")),
    *(("Nystromformer", "NystromformerForMaskedLM"), ("I-BERT", "IBertForMaskedLM")),
    *(("data2vec text", "Data2VecTextForMaskedLM"), ("Splinter", "SplinterModel")),
    *(("RoBERTa pre-LN", "RobertaPreLayerNormForMaskedLM"), ("EuroBERT", "EuroBertForMaskedLM")),
    *(("DeBERTa", "DebertaForMaskedLM"), ("SqueezeBERT", "SqueezeBertForMaskedLM")),
]:
    _extra = {"embedding_size": 64} if "Squeeze" in _kind else {}
    _own = {"num_key_value_heads": 4} if "Euro" in _kind else {}
    language(
        _name,
        _kind,
        _kind.removesuffix("Model").partition("For")[0] + "Config",
        **{**BLOCK, **_extra, **_own},
    )
T5 = {"d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
pair("UMT5", "UMT5", **T5)
pair("LongT5", "LongT5", **T5)
pair("BlenderbotSmall", "BlenderbotSmall", **SIDES)
pair("BigBird Pegasus", "BigBirdPegasus", **SIDES, attention_type="original_full")
pair("Pegasus-X", "PegasusX", **SIDES, block_size=4, num_global_tokens=2)
pair("PLBart", "PLBart", **SIDES)
pair("MVP", "Mvp", **SIDES)
image("ViT MSN", "ViTMSNForImageClassification", "ViTMSNConfig", **IMAGE)
image("ViT MAE", "ViTMAEModel", "ViTMAEConfig", **IMAGE)
image("I-JEPA", "IJepaModel", "IJepaConfig", **IMAGE)
image("AIMv2", "Aimv2VisionModel", "Aimv2VisionConfig", **IMAGE)
image(
    *("DINOv2 registers", "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
    **{**WIDTH, **DEEP, "image_size": 64, "patch_size": 16},
)
image("data2vec vision", "Data2VecVisionModel", "Data2VecVisionConfig", **IMAGE)
image("ViTDet", "VitDetModel", "VitDetConfig", **{**IMAGE, "mlp_ratio": 2})
image("CLIP vision", "CLIPVisionModel", "CLIPVisionConfig", **IMAGE)
image("Chinese-CLIP", "ChineseCLIPVisionModel", "ChineseCLIPVisionConfig", **IMAGE)
image("OWL-ViT", "OwlViTVisionModel", "OwlViTVisionConfig", **IMAGE)
image("LeViT", "LevitModel", "LevitConfig", 224)
image("SegFormer B0", "SegformerModel", "SegformerConfig")
for _name, _prefix in [
    *(("UniSpeech", "UniSpeech"), ("UniSpeech-SAT", "UniSpeechSat")),
    *(("data2vec audio", "Data2VecAudio"), ("Wav2Vec2 Conformer", "Wav2Vec2Conformer")),
]:
    sound(_name, f"{_prefix}ForCTC", f"{_prefix}Config")
transformers(
    *("transformers", "PatchTSMixer", "PatchTSMixerForPrediction", "PatchTSMixerConfig"),
    lambda: {"past_values": torch.randn(2, 32, 2)},
    zoo=WIDER,
    **{"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8},
    **{"prediction_length": 8, "d_model": 32, "num_layers": 2},
)
for _name, _model, _side in [
    ("timm Visformer", "visformer_tiny", 224),
    ("timm RelPos ViT", "vit_relpos_small_patch16_224", 224),
    ("timm SRelPos ViT", "vit_srelpos_small_patch16_224", 224),
    ("timm SAM ViT", "test_vit4", 160),
    ("timm MobileViT v2", "mobilevitv2_050", 64),
    ("timm EfficientFormer", "efficientformer_l1", 224),
    ("timm EfficientFormer v2", "efficientformerv2_s0", 224),
    ("timm Swin S3", "swin_s3_tiny_224", 224),
    ("timm MaxxViT", "maxxvit_rmlp_nano_rw_256", 256),
    ("timm InceptionNeXt", "inception_next_atto", 64),
    ("timm ConvFormer", "convformer_s18", 64),
    ("timm MambaOut", "mambaout_femto", 64),
    ("timm ConvNeXt V2", "convnextv2_atto", 64),
    ("timm RDNet", "rdnet_tiny", 64),
    ("timm NextViT", "nextvit_small", 64),
    ("timm FastViT", "fastvit_t8", 64),
    ("timm PoolFormer", "poolformer_s12", 64),
    ("timm ViTamin", "vitamin_small_224", 224),
    ("timm gMixer", "gmixer_12_224", 224),
    ("timm SwiftFormer", "swiftformer_xs", 224),
    ("timm Twins PCPVT", "twins_pcpvt_small", 224),
    ("timm CSATv2", "csatv2", 64),
]:
    timm(_name, _model, _side, zoo=WIDER)
for _name, _maker, _shape in [
    ("torchvision MViT v2", "mvit_v2_s", (1, 3, 16, 224, 224)),
    ("torchvision Swin-T", "swin_t", (1, 3, 64, 64)),
]:

    @entry(_name, "torchvision", WIDER)
    def _vision(deep: bool, maker: str = _maker, shape: tuple[int, ...] = _shape) -> Built:
        import torchvision.models

        return torchvision.models.get_model(maker, weights=None), (torch.randn(shape),)


CLIP_TEXT = {"context_length": 16, "vocab_size": VOCABULARY, "width": 64, "heads": 4, "layers": 2}
CLIP_IMAGE = {"image_size": 64, "layers": 2, "width": 64, "patch_size": 16, "head_width": 16}


@entry("open_clip CoCa", "open_clip", WIDER)
def _coca(deep: bool) -> Built:
    import open_clip

    text = {**CLIP_TEXT, "embed_cls": True, "output_tokens": True}
    image = {**CLIP_IMAGE, "attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True}
    decoder = {**CLIP_TEXT, "attn_pooler_heads": 4}
    model = open_clip.coca_model.CoCa(64, decoder, text, image)
    return model, (torch.randn(2, 3, 64, 64), tokens(15))


@entry("open_clip RoBERTa-style text", "open_clip", WIDER)
def _custom_text(deep: bool) -> Built:
    import open_clip

    text = {**CLIP_TEXT, "embed_cls": False, "pool_type": "last", "no_causal_mask": True}
    model = open_clip.model.CustomTextCLIP(64, CLIP_IMAGE, text)
    return model, (torch.randn(2, 3, 64, 64), tokens(16))


def diffusion(name: str, model: str, inputs: Any, **options: Any) -> None:
    """Add a model of diffusers."""
    diffusers(name, model, inputs, {}, zoo=WIDER, **options)


PATCHES = {"in_channels": 4, "num_layers": 2, "sample_size": 8, "patch_size": 2}


def _image_and_text(**more: Any) -> Any:
    return lambda: {
        **{"hidden_states": noise(2, 4, 8, 8), "encoder_hidden_states": noise(2, 5, 32)},
        **{key: make() for key, make in more.items()},
    }


diffusion(
    *("AuraFlow", "AuraFlowTransformer2DModel"),
    _image_and_text(timestep=lambda: torch.tensor([0.5, 0.5])),
    **{**HEADS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1},
    **{"num_single_dit_layers": 1, "joint_attention_dim": 32, "caption_projection_dim": 64},
    **{"out_channels": 4, "pos_embed_max_size": 16},
)
diffusion(
    *("Sana", "SanaTransformer2DModel"),
    _image_and_text(timestep=lambda: STEPS),
    **{**HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "sample_size": 8},
    **{"patch_size": 1, "num_cross_attention_heads": 4, "cross_attention_head_dim": 16},
    **{"cross_attention_dim": 64, "caption_channels": 32},
)
diffusion(
    *("LTX-Video", "LTXVideoTransformer3DModel"),
    lambda: {
        **{"hidden_states": noise(1, 32, 16), "encoder_hidden_states": noise(1, 5, 32)},
        **{"timestep": torch.tensor([1]), "encoder_attention_mask": torch.ones(1, 5)},
        **{"num_frames": 2, "height": 4, "width": 4, "rope_interpolation_scale": (1.0, 1.0, 1.0)},
    },
    **{**HEADS, "in_channels": 16, "out_channels": 16, "num_layers": 2, "caption_channels": 32},
    cross_attention_dim=64,
)
diffusion(
    *("Stable Audio", "StableAudioDiTModel"),
    lambda: {
        **{"hidden_states": noise(1, 4, 16), "encoder_hidden_states": noise(1, 5, 32)},
        **{"timestep": torch.tensor([1.0]), "global_hidden_states": noise(1, 1, 64)},
    },
    **{**HEADS, "sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2},
    **{"num_key_value_attention_heads": 2, "cross_attention_dim": 32, "time_proj_dim": 16},
    **{"global_states_input_dim": 64, "cross_attention_input_dim": 32},
)
diffusion(
    *("Lumina 2", "Lumina2Transformer2DModel"),
    _image_and_text(
        timestep=lambda: torch.tensor([0.5, 0.5]),
        encoder_attention_mask=lambda: torch.ones(2, 5, dtype=torch.bool),
    ),
    **{"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 64, "num_layers": 2},
    **{"num_refiner_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2, "cap_feat_dim": 32},
    **{"multiple_of": 16, "axes_dim_rope": (4, 6, 6), "axes_lens": (16, 16, 16)},
)
diffusion(
    *("Latte", "LatteTransformer3DModel"),
    lambda: {
        **{"hidden_states": noise(1, 4, 2, 8, 8), "encoder_hidden_states": noise(1, 5, 32)},
        "timestep": torch.tensor([1]),
    },
    **{**HEADS, **PATCHES, "out_channels": 8, "cross_attention_dim": 64, "caption_channels": 32},
    **{"norm_type": "ada_norm_single", "norm_elementwise_affine": False, "video_length": 2},
    attention_bias=True,
)
diffusion(
    *("U-ViT", "UVit2DModel"),
    lambda: {
        **{"input_ids": torch.randint(0, 30, (1, 8, 8)), "encoder_hidden_states": noise(1, 5, 32)},
        **{"pooled_text_emb": noise(1, 32), "micro_conds": torch.ones(1, 5)},
    },
    **{"hidden_size": 64, "cond_embed_dim": 32, "encoder_hidden_size": 32, "vocab_size": 32},
    **{"codebook_size": 30, "in_channels": 32, "block_out_channels": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "block_num_heads": 4, "num_res_blocks": 1, "sample_size": 8},
    **{"micro_cond_encode_dim": 8, "micro_cond_embed_dim": 40, "intermediate_size": 128},
)
