"""Further tiny stock pipelines, one a family of denoisers. As in `tiny_diffusion`: random weights, always the same."""

from pathlib import Path

from diffusers import (
    AutoencoderDC,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderOobleck,
    DPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    GlmImagePipeline,
    GlmImageTransformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    PNDMScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    StableAudioDiTModel,
    StableAudioPipeline,
    StableAudioProjectionModel,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    ByT5Tokenizer,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
)

from stages.demo import tiny_painter
from stages.demo.tiny_painter import letter_tokenizer
from tests.models.tiny_diffusion import clip_config, image_vae, seeded_build, t5_config, t5_tokenizer


@seeded_build
def build_tiny_sd_pndm(folder: Path) -> None:
    """StableDiffusion with PNDM, as 1.5 has it: the first steps of a request call the denoiser twice."""
    _sd_with(PNDMScheduler(skip_prk_steps=True, steps_offset=1), folder)


@seeded_build
def build_tiny_sd_dpm(folder: Path) -> None:
    """StableDiffusion with a multistep solver, which keeps former outputs for each request."""
    _sd_with(DPMSolverMultistepScheduler(), folder)


def _sd_with(scheduler: PNDMScheduler | DPMSolverMultistepScheduler, folder: Path) -> None:
    tiny_painter.build(folder)
    pipe = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    pipe.scheduler = scheduler
    pipe.save_pretrained(folder)


@seeded_build
def build_tiny_sdxl(folder: Path) -> None:
    """StableDiffusionXL: two text encoders, sizes and crops as conditions in a dict; 64 x 64."""
    StableDiffusionXLPipeline(
        unet=UNet2DConditionModel(
            block_out_channels=(8, 16),
            layers_per_block=1,
            sample_size=32,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            transformer_layers_per_block=(1, 1),
            projection_class_embeddings_input_dim=6 * 8 + 32,
            cross_attention_dim=64,
        ),
        scheduler=EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        vae=image_vae(4),
        text_encoder=CLIPTextModel(clip_config()),
        tokenizer=letter_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(clip_config()),
        tokenizer_2=letter_tokenizer(),
        add_watermarker=False,
    ).save_pretrained(folder)


@seeded_build
def build_tiny_flux2(folder: Path) -> None:
    """Flux2 without its language model: takes `prompt_embeds` (tokens, 32) from another stage. Sizes in multiples of 4."""
    Flux2Pipeline(
        transformer=Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKLFlux2(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            latent_channels=4,
            norm_num_groups=4,
            layers_per_block=1,
            sample_size=32,
        ),
        text_encoder=None,
        tokenizer=None,
    ).save_pretrained(folder)


@seeded_build
def build_tiny_qwen_image(folder: Path) -> None:
    """QwenImage: two forwards a step when guided, prompts of their own lengths, a VAE with a time axis."""
    QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=3,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(_qwen_vl_config()).eval(),
        tokenizer=qwen_tokenizer(),
    ).save_pretrained(folder)


@seeded_build
def build_tiny_z_image(folder: Path) -> None:
    """Z-Image: lists of latents and captions of any sizes; sizes in multiples of 4."""
    ZImagePipeline(
        transformer=ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[8, 4, 4],
            axes_lens=[1024, 128, 128],
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(4),
        text_encoder=Qwen3Model(
            Qwen3Config(
                vocab_size=len(qwen_tokenizer()),
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=512,
            )
        ).eval(),
        tokenizer=qwen_tokenizer(),
    ).save_pretrained(folder)


@seeded_build
def build_tiny_lumina2(folder: Path) -> None:
    """Lumina2: two forwards a step when guided, embeddings with a mask; sizes in multiples of 16."""
    Lumina2Pipeline(
        transformer=Lumina2Transformer2DModel(
            sample_size=4,
            in_channels=4,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=2,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(512, 32, 32),
            cap_feat_dim=32,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(4),
        text_encoder=_gemma2(),
        tokenizer=t5_tokenizer(),
    ).save_pretrained(folder)


@seeded_build
def build_tiny_sana(folder: Path) -> None:
    """Sana: linear attention, a multistep flow solver, sizes in multiples of 32."""
    SanaPipeline(
        transformer=SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=32,
            sample_size=8,  # none that it has a table of trained sizes for
        ),
        scheduler=DPMSolverMultistepScheduler(
            algorithm_type="dpmsolver++",
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=3.0,
        ),
        vae=AutoencoderDC(
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41407,
        ),
        text_encoder=_gemma2(),
        tokenizer=t5_tokenizer(),
    ).save_pretrained(folder)


@seeded_build
def build_tiny_glm_image(folder: Path) -> None:
    """GLM-Image without its language model: takes `prior_token_ids`, one for 4 x 4 latents. Sizes in multiples of 8."""
    GlmImagePipeline(
        transformer=GlmImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            text_embed_dim=32,
            time_embed_dim=16,
            condition_dim=8,
            prior_vq_quantizer_codebook_size=32,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(4, mean=[0.0] * 4, std=[1.0] * 4),
        text_encoder=T5EncoderModel(
            T5Config(
                vocab_size=len(ByT5Tokenizer()), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4,
                relative_attention_num_buckets=8,
            )
        ),
        tokenizer=ByT5Tokenizer(),
        processor=None,
        vision_language_encoder=None,
    ).save_pretrained(folder)  # fmt: skip


@seeded_build
def build_tiny_stable_audio(folder: Path) -> None:
    """StableAudio: stereo sound, one timestep for both halves of a guided step."""
    StableAudioPipeline(
        transformer=StableAudioDiTModel(
            sample_size=8,
            in_channels=3,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            num_key_value_attention_heads=1,
            out_channels=3,
            cross_attention_dim=8,
            time_proj_dim=8,
            global_states_input_dim=16,
            cross_attention_input_dim=8,
        ),
        scheduler=EDMDPMSolverMultistepScheduler(solver_order=2, prediction_type="v_prediction", sigma_data=1.0),
        vae=AutoencoderOobleck(
            encoder_hidden_size=6,
            downsampling_ratios=[1, 2],
            decoder_channels=3,
            decoder_input_channels=3,
            audio_channels=2,
            channel_multiples=[2, 4],
            sampling_rate=4,
        ),
        text_encoder=T5EncoderModel(t5_config(T5Config)),
        tokenizer=t5_tokenizer(),
        projection_model=StableAudioProjectionModel(text_encoder_dim=32, conditioning_dim=8, min_value=0, max_value=32),
    ).save_pretrained(folder)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Qwen's byte-level tokenizer with a vocabulary of single bytes and a chat template."""
    letters = [word for word in letter_tokenizer().get_vocab() if len(word) == 1]
    tokenizer = Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate([*sorted(letters), "<|endoftext|>"])}, merges=[]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    return tokenizer


def _qwen_vl_config() -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(qwen_tokenizer()),
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 10000.0},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
        },
    )


def _gemma2() -> Gemma2Model:
    return Gemma2Model(
        Gemma2Config(
            vocab_size=len(t5_tokenizer()),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=1024,
        )
    ).eval()


FAMILIES = {
    "sd_pndm": build_tiny_sd_pndm,
    "sd_dpm": build_tiny_sd_dpm,
    "sdxl": build_tiny_sdxl,
    "flux2": build_tiny_flux2,
    "qwen_image": build_tiny_qwen_image,
    "z_image": build_tiny_z_image,
    "lumina2": build_tiny_lumina2,
    "sana": build_tiny_sana,
    "glm_image": build_tiny_glm_image,
    "stable_audio": build_tiny_stable_audio,
}
