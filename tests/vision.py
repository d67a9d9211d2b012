"""
Tiny vision-language models and their processors, made from configurations.

The families differ in how their processors lay out the images of a batch: patches of all images with a grid for each
(Qwen2-VL), one picture after the other (Gemma 3), or padded to the same number of pictures in every row (Idefics 3).
"""

import torch
from PIL import Image
from rig import VOCABULARY, make_tokenizer
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PaddleOCRVLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
IMAGE, START, END = VOCABULARY, VOCABULARY + 1, VOCABULARY + 2


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Coloured noise: no two pictures are alike."""
    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def _tokenizer(**tokens):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<start>", "<end>", "<video>"]})
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


def _template(image: str) -> str:
    """Words and pictures in the order of the messages."""
    part = "{% if part.type == 'image' %}" + image + "{% else %}{{ part.text }}{% endif %} "
    return "{% for m in messages %}{% for part in m.content %}" + part + "{% endfor %}{% endfor %}"


def qwen2_vl(tokenizer=None, chat_template=None):
    torch.manual_seed(0)
    tokenizer = tokenizer or _tokenizer(image_token="<image>")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    size = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "rope_parameters": rope}
    config = Qwen2VLConfig(
        text_config=TEXT | size | {"max_position_embeddings": 4096},
        vision_config={
            "depth": 1,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
        },
        image_token_id=tokenizer.image_token_id,
        vision_start_token_id=tokenizer.image_token_id + 1,
        vision_end_token_id=tokenizer.image_token_id + 2,
        video_token_id=tokenizer.image_token_id + 3,
    )
    # Qwen2-VL's own processor wants one for videos, which needs torchvision; this one lays out images alike.
    processor = PaddleOCRVLProcessor(
        Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024),
        tokenizer,
        chat_template=chat_template or _template("<start> <image> <end>"),
    )
    return Qwen2VLForConditionalGeneration(config), processor


def gemma3():
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config=TEXT | {"vocab_size": VOCABULARY + 4, "head_dim": 16, "sliding_window": 64},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    processor = Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 16, "width": 16}),
        _tokenizer(image_token="<image>", boi_token="<start>", eoi_token="<end>"),
        image_seq_length=4,
        chat_template=_template("<start>"),
    )
    return Gemma3ForConditionalGeneration(config), processor


def idefics3():
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(
            size={"longest_edge": 16}, max_image_size={"longest_edge": 16}, do_image_splitting=False
        ),
        tokenizer,
        image_seq_len=4,
        chat_template=_template("<image>"),
    )
    config = Idefics3Config(
        text_config={"model_type": "llama", **TEXT, "vocab_size": len(tokenizer)},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        image_token_id=processor.image_token_id,
        scale_factor=2,
        pad_token_id=0,
    )
    return Idefics3ForConditionalGeneration(config), processor


FAMILIES = {"qwen2_vl": qwen2_vl, "gemma3": gemma3, "idefics3": idefics3}
