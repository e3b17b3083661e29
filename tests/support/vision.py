"""Tiny random targets that take images, saved with their processors as their publishers save them."""

import base64
import io
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tests.support.architectures import SIZES
from tests.support.chats import tokenizer

TEXT: dict[str, Any] = SIZES | {"head_dim": 8, "vocab_size": 320}
TEXT |= {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 256}
MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 1, 1]}
SIGHT = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32}
SIGHT |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.3}
SPECIAL = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPECIAL += ["<|video_pad|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
IDS = {word: 256 + number for number, word in enumerate(SPECIAL)}
MARKED = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>", "gemma": "<start_of_image>"}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for part in "
    "m.content %}{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def configs() -> dict[str, hf.PreTrainedConfig]:
    ids = {"image_token_id": IDS["<|image_pad|>"], "video_token_id": IDS["<|video_pad|>"]}
    ids |= {"vision_start_token_id": IDS["<|vision_start|>"], "vision_end_token_id": IDS["<|vision_end|>"]}
    positions = {"num_position_embeddings": 64}
    mrope = TEXT | {"rope_parameters": MROPE}
    mixed = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2}
    mixed |= {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    partial = {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}}
    siglip = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    siglip |= {"image_size": 16, "patch_size": 4, "vision_use_head": False}
    return {
        "qwen2_5_vl": hf.Qwen2_5_VLConfig(
            text_config=mrope, vision_config=SIGHT | {"window_size": 16, "fullatt_block_indexes": [1]}, **ids
        ),
        "qwen3_vl": hf.Qwen3VLConfig(
            text_config=mrope, vision_config=SIGHT | positions | {"deepstack_visual_indexes": [0]}, **ids
        ),
        "qwen3_5": hf.Qwen3_5Config(
            text_config=TEXT | mixed | partial,
            vision_config=SIGHT | positions | {"deepstack_visual_indexes": []},
            **ids,
        ),
        "gemma3": hf.Gemma3Config(
            text_config=TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
            vision_config=siglip,
            mm_tokens_per_image=4,
            image_token_index=IDS["<image_soft_token>"],
            boi_token_index=IDS["<start_of_image>"],
            eoi_token_index=IDS["<end_of_image>"],
        ),
    }


def save_target(kind: str, path: Path) -> Path:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(0)
    model = hf.AutoModelForImageTextToText.from_config(configs()[kind], dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim < 2:  # at their initial 0 or 1 one left out would not show
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    family = "gemma" if kind == "gemma3" else "qwen"
    words = tokenizer(TEMPLATE.replace("MARK", MARKED[family]), "<|endoftext|>", "<|im_end|>", SPECIAL)
    if family == "gemma":
        named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
        words = hf.PreTrainedTokenizerFast(
            tokenizer_object=words.backend_tokenizer,
            bos_token="<|endoftext|>",
            eos_token="<|im_end|>",
            extra_special_tokens=named,
            chat_template=words.chat_template,
        )
        Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, image_seq_length=4).save_pretrained(path)
    else:
        size = {"shortest_edge": 64, "longest_edge": 1024}
        Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size).save_pretrained(path)
    words.save_pretrained(path)
    if family == "gemma":  # what its own says
        (path / "processor_config.json").write_text('{"processor_class": "Gemma3Processor", "image_seq_length": 4}')
    return path


def png(seed: int, width: int = 24, height: int = 16) -> bytes:
    from PIL import Image

    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return file.getvalue()


def address(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
