"""Models that others wrote, from their configurations with random weights: narrow, and not deep.

Each entry builds a model and the inputs of one forward. Widths are tiny, since what a graph looks
like does not hang on them; depths are a few layers, where layers are alike, or true: those of the
model as it was published, its configuration's default where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 97
Inputs = dict[str, Any] | tuple[Any, ...]
Built = tuple[nn.Module, Inputs]
# Called with whether the model is to have its true depth.
Build = Callable[[bool], Built]
# Families and builds by names.
Zoo = dict[str, tuple[str, Build]]
ZOO: Zoo = {}
# Options that say how many layers there are.
_DEPTHS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "depths"}
_DEPTHS |= {"encoder_layers", "decoder_layers"}

TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTH = {"hidden_size": 64, "num_attention_heads": 4}
MLP = {"intermediate_size": 128}
GROUPED = {"num_key_value_heads": 2}
DEEP = {"num_hidden_layers": 2}
BLOCK = {**WIDTH, **MLP, **DEEP}
GPT = {"n_embd": 64, "n_head": 4, "n_layer": 2}


def tokens(length: int = 7, batch: int = 2) -> torch.Tensor:
    return torch.randint(5, VOCABULARY - 5, (batch, length))


def entry(name: str, family: str, zoo: Zoo = ZOO) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        zoo[name] = (family, build)
        return build

    return add


def transformers(
    family: str,
    name: str,
    model: str,
    config: str,
    inputs: Any,
    true: dict[str, Any] | None = None,
    zoo: Zoo = ZOO,
    **options: Any,
) -> None:
    """Add a model of transformers; `inputs` makes those of a forward, `true` options of depth."""

    @entry(name, family, zoo)
    def build(deep: bool) -> Built:
        import transformers

        kind = getattr(transformers, config)
        depths: dict[str, Any] = {}
        if deep:
            depths = {key: getattr(kind(), key) for key in _DEPTHS & options.keys()}
        made = kind(**{**options, **depths, **(true or {} if deep else {})})
        # Caches of past keys are no part of one forward.
        made.use_cache = False
        return getattr(transformers, model)(made), inputs()


def decoder(name: str, prefix: str, **options: Any) -> None:
    transformers(
        "decoder",
        name,
        f"{prefix}ForCausalLM" if not prefix.endswith("LMHead") else f"{prefix}Model",
        f"{prefix.removesuffix('LMHead')}Config",
        lambda: {"input_ids": tokens()},
        **{**TOKENS, **options},
    )


decoder("GPT-2", "GPT2LMHead", **GPT)
decoder("GPT-NeoX", "GPTNeoX", **BLOCK)
decoder("GPT-J", "GPTJ", **GPT, rotary_dim=8)
decoder(
    *("GPT-Neo", "GPTNeo"),
    **{"hidden_size": 64, "num_heads": 4, "num_layers": 2, **MLP},
    attention_types=[[["global", "local"], 1]],
    true={"num_layers": 24, "attention_types": [[["global", "local"], 12]]},
)
decoder("CodeGen", "CodeGen", **GPT, rotary_dim=8)
decoder("Phi-2", "Phi", **BLOCK)
decoder("Phi-3", "Phi3", **BLOCK, num_key_value_heads=4)
FALCON = {**WIDTH, **DEEP, "bias": False, "alibi": False}
decoder(
    *("Falcon-7b", "Falcon"),
    **FALCON,
    new_decoder_architecture=False,
    parallel_attn=True,
    multi_query=True,
)
decoder("Falcon-40b", "Falcon", **FALCON, new_decoder_architecture=True, num_kv_heads=2)
decoder("StarCoder", "GPTBigCode", **GPT)
decoder("StarCoder2", "Starcoder2", **BLOCK, **GROUPED)
decoder("BLOOM", "Bloom", hidden_size=64, n_head=4, n_layer=2, true={"n_layer": 24})
decoder("MPT", "Mpt", d_model=64, n_heads=4, n_layers=2)
decoder(
    *("OPT", "OPT"),
    **{**WIDTH, **DEEP, "ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    do_layer_norm_before=True,
)
decoder("StableLM-2", "StableLm", **BLOCK, num_key_value_heads=4)
decoder("Persimmon", "Persimmon", **BLOCK)
decoder("Nemotron-4", "Nemotron", **BLOCK, **GROUPED)
decoder("Command-R", "Cohere", **BLOCK)
decoder("OLMo", "Olmo", **BLOCK)
decoder("OLMo-2", "Olmo2", **BLOCK)
for _name, _prefix in [
    *(("LLaMA-3", "Llama"), ("Mistral", "Mistral"), ("Qwen2", "Qwen2"), ("Granite-3", "Granite")),
    ("SmolLM3", "SmolLM3"),
]:
    decoder(_name, _prefix, **BLOCK, **GROUPED)
decoder("Qwen3", "Qwen3", **BLOCK, **GROUPED, head_dim=16)
decoder("GLM-4", "Glm", **BLOCK, **GROUPED, head_dim=16)
decoder("Mixtral", "Mixtral", **BLOCK, **GROUPED, num_local_experts=2)
decoder("Gemma", "Gemma", **BLOCK, num_key_value_heads=4, head_dim=16)
decoder("Gemma 2", "Gemma2", **BLOCK, **GROUPED, head_dim=16)
transformers(
    *("decoder", "Gemma 3", "Gemma3ForCausalLM", "Gemma3TextConfig"),
    lambda: {"input_ids": tokens()},
    **{**TOKENS, **BLOCK, **GROUPED, "head_dim": 16},
)
decoder("Mamba", "Mamba", hidden_size=64, num_hidden_layers=2, state_size=8)
decoder(
    *("DeepSeek-V3", "DeepseekV3"),
    **{**BLOCK, "moe_intermediate_size": 32, "num_key_value_heads": 4, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16},
    **{"q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16},
    first_k_dense_replace=1,
)


def encoder(name: str, prefix: str, model: str = "ForMaskedLM", **options: Any) -> None:
    transformers(
        *("encoder", name, prefix + model, f"{prefix}Config"),
        lambda: {"input_ids": tokens()},
        **{**TOKENS, **options},
    )


encoder("BERT", "Bert", **BLOCK)
encoder("RoBERTa", "Roberta", **BLOCK)
encoder("DistilBERT", "DistilBert", dim=64, n_heads=4, hidden_dim=128, n_layers=2)
encoder(
    *("DeBERTa-v3", "DebertaV2"),
    **{**BLOCK, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
    **{"norm_rel_ebd": "layer_norm", "share_att_key": True, "max_relative_positions": -1},
    position_biased_input=False,
)
encoder("ELECTRA", "Electra", "ForPreTraining", **BLOCK, embedding_size=64)
encoder("ALBERT", "Albert", **BLOCK, embedding_size=32)
encoder("ModernBERT", "ModernBert", **BLOCK, cls_token_id=1, sep_token_id=2)
encoder(
    *("ESM-2", "Esm"),
    **{**BLOCK, "mask_token_id": 3, "position_embedding_type": "rotary"},
    **{"emb_layer_norm_before": False, "token_dropout": False},
)


def vision(name: str, model: str, config: str, shape: Any = (2, 3, 64, 64), **options: Any) -> None:
    transformers(
        *("vision", name, model, config), lambda: {"pixel_values": torch.randn(shape)}, **options
    )


IMAGE = {**BLOCK, "image_size": 64, "patch_size": 16}
vision("ViT", "ViTForImageClassification", "ViTConfig", **IMAGE)
vision("DeiT", "DeiTForImageClassification", "DeiTConfig", **IMAGE)
DINO = {**WIDTH, **DEEP, "image_size": 64, "patch_size": 16}
vision("DINOv2", "Dinov2ForImageClassification", "Dinov2Config", **DINO)
vision("DINOv3", "DINOv3ViTModel", "DINOv3ViTConfig", **IMAGE)
vision("BEiT", "BeitForImageClassification", "BeitConfig", **IMAGE)
vision("VideoMAE", "VideoMAEModel", "VideoMAEConfig", (1, 4, 3, 64, 64), **IMAGE, num_frames=4)
vision(
    # The fourth stage of the true depth still has a whole window.
    *("Swin", "SwinForImageClassification", "SwinConfig", (2, 3, 224, 224)),
    **{"image_size": 224, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [1, 2]},
    window_size=7,
    true={"depths": [2, 2, 6, 2], "num_heads": [1, 2, 2, 4]},
)
STAGES = {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 2, 1]}
vision("ConvNeXt", "ConvNextForImageClassification", "ConvNextConfig", **STAGES)
vision("ConvNeXt V2", "ConvNextV2ForImageClassification", "ConvNextV2Config", **STAGES)
vision(
    *("SegFormer", "SegformerForImageClassification", "SegformerConfig"),
    **STAGES,
    num_attention_heads=[1, 2, 4, 8],
)
TEXT = {**TOKENS, **BLOCK}


@entry("CLIP", "vision")
def _clip(deep: bool) -> Built:
    import transformers

    text, image = ({**sizes, "num_hidden_layers": 12 if deep else 2} for sizes in (TEXT, IMAGE))
    config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=32)
    return transformers.CLIPModel(config), {
        "input_ids": tokens(),
        "pixel_values": torch.randn(2, 3, 64, 64),
    }


@entry("SigLIP", "vision")
def _siglip(deep: bool) -> Built:
    import transformers

    text, image = ({**sizes, "num_hidden_layers": 12 if deep else 2} for sizes in (TEXT, IMAGE))
    config = transformers.SiglipConfig(
        text_config={**text, "projection_size": 64}, vision_config=image
    )
    return transformers.SiglipModel(config), {
        "input_ids": tokens(),
        "pixel_values": torch.randn(2, 3, 64, 64),
    }


vision(
    *("SAM", "SamVisionModel", "SamVisionConfig", (1, 3, 128, 128)),
    **{**WIDTH, **DEEP, "image_size": 128, "patch_size": 16, "window_size": 4, "mlp_dim": 128},
    global_attn_indexes=[1],
    output_channels=32,
    true={"num_hidden_layers": 12, "global_attn_indexes": [2, 5, 8, 11]},
)


@entry("DETR", "vision")
def _detr(deep: bool) -> Built:
    import transformers

    sides = {**_SIDES, "layers": 6 if deep else 2}
    stages = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
    config = transformers.DetrConfig(
        d_model=64,
        **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in sides.items()},
        use_pretrained_backbone=False,
        use_timm_backbone=False,
        backbone=None,
        backbone_config=transformers.ResNetConfig(
            **stages, layer_type="basic", out_features=["stage4"]
        ),
    )
    return transformers.DetrForObjectDetection(config), {"pixel_values": torch.randn(1, 3, 64, 64)}


_SIDES = {"attention_heads": 4, "ffn_dim": 128, "layers": 2}


@entry("Qwen2-VL vision", "vision")
def _qwen2_vl(deep: bool) -> Built:
    from transformers.models.qwen2_vl import configuration_qwen2_vl, modeling_qwen2_vl

    config = configuration_qwen2_vl.Qwen2VLVisionConfig(
        depth=32 if deep else 2,
        **{"embed_dim": 64, "hidden_size": 64, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2},
    )
    rows = torch.randn(64, 3 * 2 * 4 * 4)
    model = modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel(config)
    return model, {"hidden_states": rows, "grid_thw": torch.tensor([[1, 8, 8]])}


SIDES = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _SIDES.items()}
PAIR = {**TOKENS, **SIDES, "d_model": 64, "decoder_start_token_id": 1}
transformers(
    *("audio", "Whisper", "WhisperForConditionalGeneration", "WhisperConfig"),
    lambda: {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": tokens()},
    **{**PAIR, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20},
    true={"encoder_layers": 32, "decoder_layers": 32},
)
WAVES = {
    **{**BLOCK, "vocab_size": VOCABULARY, "conv_dim": (16,) * 7, "apply_spec_augment": False},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0},
}
for _name, _options in [
    ("Wav2Vec2", {}),
    ("Wav2Vec2 lv60", {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}),
]:
    transformers(
        *("audio", _name, "Wav2Vec2ForCTC", "Wav2Vec2Config"),
        lambda: {"input_values": torch.randn(1, 8000)},
        **WAVES,
        **_options,
    )
transformers(
    *("audio", "Parakeet", "ParakeetEncoder", "ParakeetEncoderConfig"),
    lambda: {"input_features": torch.randn(1, 64, 16)},
    # BatchNorm takes the bias of a convolution out again: its gradient is rounding alone.
    **{**BLOCK, "num_mel_bins": 16, "subsampling_conv_channels": 16, "convolution_bias": False},
)
for _name, _model, _config, _options in [
    (
        *("T5", "T5ForConditionalGeneration", "T5Config"),
        {"d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    ),
    ("BART", "BartForConditionalGeneration", "BartConfig", SIDES),
    ("M2M100", "M2M100ForConditionalGeneration", "M2M100Config", SIDES),
]:
    transformers(
        *("encoder and decoder", _name, _model, _config),
        lambda: {"input_ids": tokens(), "decoder_input_ids": tokens()},
        **{**TOKENS, "d_model": 64, "decoder_start_token_id": 1, **_options},
    )


def timm(name: str, model: str, size: int, zoo: Zoo = ZOO, **options: Any) -> None:
    @entry(name, "timm", zoo)
    def build(deep: bool) -> Built:
        import timm

        given = options
        if deep:
            # Stages that are fewer than in the model have their own widths and heads.
            whole = {} if options == STAGED else options
            given = {key: option for key, option in whole.items() if key not in _DEPTHS}
        return timm.create_model(model, pretrained=False, **given), (torch.randn(1, 3, size, size),)


TINY = {"embed_dim": 48, "depth": 2, "num_heads": 3}
timm("timm ViT", "vit_base_patch16_224", 224, **TINY)
timm("timm DeiT3", "deit3_base_patch16_224", 224, **TINY)
timm("timm DINOv2", "vit_small_patch14_dinov2", 112, img_size=112, **TINY)
timm("timm SigLIP", "vit_base_patch16_siglip_224", 224, **TINY)
timm("timm EVA02", "eva02_small_patch14_224", 112, img_size=112, **TINY)
timm("timm BEiT", "beit_base_patch16_224", 224, **TINY)
STAGED = {"embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2)}
timm("timm Swin", "swin_tiny_patch4_window7_224", 224, **STAGED)
timm("timm Swin V2", "swinv2_tiny_window8_256", 256, **STAGED)
timm("timm ConvNeXt", "convnext_tiny", 64, depths=(1, 1, 2, 1), dims=(16, 32, 48, 64))


@entry("timm Mixer", "timm")
def _mixer(deep: bool) -> Built:
    from timm.models.mlp_mixer import MlpMixer

    model = MlpMixer(100, img_size=64, num_blocks=12 if deep else 2, embed_dim=48)
    return model, (torch.randn(1, 3, 64, 64),)


timm("timm CaiT", "cait_s24_224", 224, **TINY)
timm("timm XCiT", "xcit_small_12_p16_224", 224, **TINY)
timm(
    *("timm Twins", "twins_svt_small", 224),
    **{"embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4), "depths": (2, 2, 2, 2)},
)
timm(
    *("timm PVT v2", "pvt_v2_b1", 64),
    **{"embed_dims": (16, 32, 48, 64), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4)},
)
timm("timm MaxViT", "maxvit_tiny_tf_224", 224)
timm("timm Hiera", "hiera_tiny_224", 224)
timm("timm CrossViT", "crossvit_small_240", 240)


@entry("torchvision ViT", "torch")
def _torchvision_vit(deep: bool) -> Built:
    from torchvision.models.vision_transformer import VisionTransformer

    model = VisionTransformer(64, 16, 12 if deep else 2, 4, 64, 128)
    return model, (torch.randn(2, 3, 64, 64),)


@entry("torchvision Swin", "torch")
def _torchvision_swin(deep: bool) -> Built:
    from torchvision.models.swin_transformer import SwinTransformer

    depths, heads = ([2, 2, 6, 2], [1, 2, 2, 4]) if deep else ([2, 2], [1, 2])
    return SwinTransformer([4, 4], 16, depths, heads, [7, 7]), (torch.randn(1, 3, 56, 56),)


@entry("open_clip ViT", "torch")
def _open_clip(deep: bool) -> Built:
    import open_clip

    layers = 12 if deep else 2
    text = {"context_length": 16, "vocab_size": VOCABULARY, "width": 64, "heads": 4}
    text["layers"] = layers
    image = {"image_size": 64, "layers": layers, "width": 64, "patch_size": 16, "head_width": 16}
    model = open_clip.model.CLIP(embed_dim=64, vision_cfg=image, text_cfg=text)
    return model, (torch.randn(2, 3, 64, 64), tokens(16))


for _name, _first in [
    ("nn.TransformerEncoder pre-LN", True),
    ("nn.TransformerEncoder post-LN", False),
]:

    @entry(_name, "torch")
    def _encoder(deep: bool, first: bool = _first) -> Built:
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=first)
        model = nn.TransformerEncoder(layer, 6 if deep else 2, enable_nested_tensor=False)
        return model, (torch.randn(2, 7, 64),)


def diffusers(
    name: str,
    model: str,
    inputs: Callable[[], Inputs],
    true: dict[str, Any],
    zoo: Zoo = ZOO,
    **options: Any,
) -> None:
    @entry(name, "diffusers", zoo)
    def build(deep: bool) -> Built:
        import diffusers

        return getattr(diffusers, model)(**{**options, **(true if deep else {})}), inputs()


HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
PATCHES = {"in_channels": 4, "num_layers": 2, "sample_size": 8, "patch_size": 2}
STEPS = torch.tensor([1, 2])
noise = torch.randn
diffusers(
    *("DiT", "DiTTransformer2DModel"),
    lambda: {"hidden_states": noise(2, 4, 8, 8), "timestep": STEPS, "class_labels": STEPS},
    true={"num_layers": 28},
    **{**HEADS, **PATCHES, "out_channels": 8, "num_embeds_ada_norm": 10},
    norm_elementwise_affine=False,
)
diffusers(
    *("SD3", "SD3Transformer2DModel"),
    lambda: {
        **{"hidden_states": noise(2, 4, 8, 8), "encoder_hidden_states": noise(2, 5, 32)},
        **{"pooled_projections": noise(2, 32), "timestep": STEPS},
    },
    true={"num_layers": 24},
    **{**HEADS, **PATCHES, "joint_attention_dim": 32, "caption_projection_dim": 64},
    **{"pooled_projection_dim": 32, "out_channels": 4, "pos_embed_max_size": 16},
)
diffusers(
    *("Flux", "FluxTransformer2DModel"),
    lambda: {
        **{"hidden_states": noise(1, 16, 16), "encoder_hidden_states": noise(1, 5, 32)},
        **{"pooled_projections": noise(1, 32), "timestep": torch.tensor([1.0])},
        **{"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3), "guidance": None},
    },
    true={"num_layers": 19, "num_single_layers": 38},
    **{**HEADS, "patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 2},
    **{"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6)},
)
diffusers(
    *("PixArt-Sigma", "PixArtTransformer2DModel"),
    lambda: {
        **{"hidden_states": noise(2, 4, 8, 8), "encoder_hidden_states": noise(2, 5, 32)},
        **{"timestep": STEPS, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    },
    true={"num_layers": 28},
    **{**HEADS, **PATCHES, "out_channels": 8, "cross_attention_dim": 64, "caption_channels": 32},
    **{"norm_type": "ada_norm_single", "norm_elementwise_affine": False},
    use_additional_conditions=False,
)
diffusers(
    *("Wan 2.1", "WanTransformer3DModel"),
    lambda: {
        **{"hidden_states": noise(1, 4, 2, 8, 8), "timestep": torch.tensor([1])},
        "encoder_hidden_states": noise(1, 5, 32),
    },
    true={"num_layers": 30},
    **{**HEADS, "patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 32},
    **{"freq_dim": 16, "ffn_dim": 128, "num_layers": 2, "cross_attn_norm": True},
)
diffusers(
    *("CogVideoX", "CogVideoXTransformer3DModel"),
    lambda: {
        **{"hidden_states": noise(1, 2, 4, 8, 8), "encoder_hidden_states": noise(1, 5, 32)},
        "timestep": torch.tensor([1]),
    },
    true={"num_layers": 30},
    **{**HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 32},
    **{"num_layers": 2, "sample_width": 8, "sample_height": 8, "sample_frames": 5},
    **{"patch_size": 2, "max_text_seq_length": 5, "temporal_compression_ratio": 4},
)


def _unet_inputs() -> Inputs:
    return {
        **{"sample": noise(1, 4, 16, 16), "timestep": torch.tensor([1])},
        "encoder_hidden_states": noise(1, 5, 32),
    }


diffusers(
    *("SDXL", "UNet2DConditionModel", _unet_inputs),
    true={
        **{"layers_per_block": 2, "block_out_channels": (32, 64, 64)},
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        **{"transformer_layers_per_block": [1, 2, 10], "attention_head_dim": [2, 4, 4]},
    },
    **{"sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1},
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    **{"transformer_layers_per_block": [1, 2], "attention_head_dim": [2, 4]},
    **{"cross_attention_dim": 32, "use_linear_projection": True},
)
diffusers(
    *("SD1.5", "UNet2DConditionModel", _unet_inputs),
    true={
        **{"layers_per_block": 2, "block_out_channels": (32, 32, 64, 64)},
        "down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
        "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
    },
    **{"sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1},
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    **{"cross_attention_dim": 32, "attention_head_dim": 8},
)
