"""Tiny random models with images, of both families, as directories with all files that a user's model would have.

A directory has config, weights, a tokenizer of one token a byte with Qwen's marks and chat template, and the image processor's
config as its family writes it. Heads are of the sizes that vLLM takes on a CPU: 32 in the text, 16 in the tower.
"""

import json
from pathlib import Path

from helpers import DELTA, MOE, SMALL

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
VOCABULARY = 272  # 256 bytes, the marks, and a few rows of the embedding that no token has
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = SMALL | dict(
    vocab_size=VOCABULARY,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    eos_token_id=256 + MARKS.index("<|im_end|>"),
    pad_token_id=256,
)
TOWER = dict(depth=3, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64, initializer_range=0.2)


def pixels_of(images):
    """The pixels [patches, values of a patch] of all images of a prompt."""
    import torch

    return torch.cat([images.pixels_of(number) for number in range(len(images.sources))])


def config(kind: str, **more):
    """kind: "qwen3-vl" (deepstack, untied head), "qwen3-vl-moe", "qwen3.5" (gated delta nets), "qwen3.5-moe", or "qwen2.5-vl"
    (windows in the tower, tied head). more: of the language model's config."""
    from transformers import Qwen2_5_VLConfig, Qwen3_5Config, Qwen3_5MoeConfig, Qwen3VLConfig, Qwen3VLMoeConfig

    names = dict(vision_start="vision_start", vision_end="vision_end", image="image_pad", video="video_pad")
    ids = {f"{name}_token_id": 256 + MARKS.index(f"<|{mark}|>") for name, mark in names.items()}
    if kind.startswith("qwen3-vl"):
        rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[6, 5, 5], mrope_interleaved=True)
        tower = TOWER | dict(patch_size=16, num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
        text = TEXT | dict(rope_parameters=rope) | more
        if kind.endswith("-moe"):
            text = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True) | text
            return Qwen3VLMoeConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
        return Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    if kind.startswith("qwen3.5"):
        rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1], mrope_interleaved=True)
        text = DELTA | TEXT | dict(rope_parameters=rope | {"partial_rotary_factor": 0.25}) | more
        tower = TOWER | dict(patch_size=16, num_position_embeddings=64)
        if kind.endswith("-moe"):
            text = MOE | dict(num_experts=4, shared_expert_intermediate_size=32) | text
            return Qwen3_5MoeConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
        return Qwen3_5Config(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6])
    tower = TOWER | dict(patch_size=14, window_size=56, fullatt_block_indexes=[1])
    text = {k: v for k, v in TEXT.items() if k != "head_dim"} | dict(rope_parameters=rope, tie_word_embeddings=True) | more
    return Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)


def save_tokenizer(path: Path) -> None:
    """A tokenizer with one token per byte, then the marks."""
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {character: i for i, character in enumerate(bytes_to_unicode().values())}
    vocab |= {mark: 256 + i for i, mark in enumerate(MARKS)}
    names = dict(pad_token=MARKS[0], eos_token="<|im_end|>", unk_token=None, bos_token=None)
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], additional_special_tokens=MARKS[1:2] + MARKS[3:], **names)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)


def save_image_processor(kind: str, path: Path, max_pixels: int) -> None:
    """As the family's own files have it: Qwen3-VL's name the limits `size`, Qwen2.5-VL's min_pixels and max_pixels."""
    if kind.startswith("qwen3"):
        half, size = [0.5, 0.5, 0.5], {"shortest_edge": 4 * 32**2, "longest_edge": max_pixels}
        own = {"patch_size": 16, "image_mean": half, "image_std": half, "image_processor_type": "Qwen2VLImageProcessorFast"}
        own |= {"size": size, "processor_class": "Qwen3VLProcessor"}
    else:
        mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
        own = {"patch_size": 14, "image_mean": mean, "image_std": std, "image_processor_type": "Qwen2VLImageProcessor"}
        own |= {"min_pixels": 4 * 28**2, "max_pixels": max_pixels, "processor_class": "Qwen2_5_VLProcessor"}
    (path / "preprocessor_config.json").write_text(json.dumps(own | {"temporal_patch_size": 2, "merge_size": 2}))


def save_vlm(kind: str, path: Path, max_pixels: int = 2**17, **more) -> str:
    """The directory, made. max_pixels: of an image after its resizing, 128 tokens of Qwen3-VL by default. more: see config."""
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config(kind, **more)).save_pretrained(path)
    save_tokenizer(path)
    save_image_processor(kind, Path(path), max_pixels)
    return str(path)


def picture(width: int, height: int, seed: int = 0):
    """A PIL image of random colours in blocks, which survive a resizing."""
    import numpy as np
    from PIL import Image

    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.NEAREST)


def encoded(image, format: str = "PNG", **options) -> bytes:
    """Return the bytes of the picture's file, of this format."""
    import io

    image.save(file := io.BytesIO(), format, **options)
    return file.getvalue()


def png(image) -> bytes:
    return encoded(image)


def odd_files() -> dict[str, tuple[bytes, object]]:
    """Kind -> an image's file and what is seen of it, a plain PIL image: what people's data holds."""
    import numpy as np
    from PIL import Image

    palette = picture(96, 64, 9).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    plain, turned = palette.convert("RGB"), Image.Exif()
    turned[0x0112] = 6  # a quarter turn: the camera was held upright
    faded, half = plain.convert("RGBA"), plain.copy()
    faded.paste((0, 0, 0, 0), (48, 0, 96, 64))
    half.paste("white", (48, 0, 96, 64))
    grey = np.asarray(plain.convert("L"))
    frames = {"save_all": True, "append_images": [Image.new("P", palette.size)], "duration": 50}
    return {
        "palette": (encoded(palette), plain),
        "animated": (encoded(palette, "GIF", **frames), plain),
        "transparent": (encoded(faded), half),
        "turned by EXIF": (encoded(plain.transpose(Image.Transpose.ROTATE_90), exif=turned), plain),
        "grey, 16 bits": (encoded(Image.fromarray(grey.astype(np.uint16) * 257)), Image.fromarray(grey).convert("RGB")),
        "large": (encoded(picture(1500, 1000, 9), "TIFF"), picture(1500, 1000, 9)),
    }


def prompt_with_images(path: str, text: str, pictures: list):
    """(token ids, Images or None) of a user's message: the pictures, PIL images or files, then the text."""

    from transformers import AutoConfig, AutoTokenizer

    from rl.data.image_prompts import ImagePrep

    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    ids = AutoTokenizer.from_pretrained(path).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    prep = ImagePrep(path, AutoConfig.from_pretrained(path))
    files = [of if isinstance(of, bytes) else png(of) for of in pictures]
    return prep.expand(ids, files) if pictures else (ids, None)


def prompts_by_number(path: str, count: int) -> list:
    """This many prompts of prompt_with_images: without an image, with one, or with the same one twice."""
    pictures = [[picture(64, 64 + 40 * (n % 2), n)] * ((count - 1 - n) % 3) for n in range(count)]
    return [prompt_with_images(path, "what?", of_prompt) for of_prompt in pictures]


def row(text: str, images: list, answer: str = "1") -> dict:
    """A row in verl's layout; images: PIL. `text` holds "<image>" once for each of them."""
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": text}],
        "images": [{"bytes": png(image), "path": None} for image in images],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": 0},
    }
