"""Tiny random models of images and text, pictures, and rows that hold them."""

import io
import random
from pathlib import Path

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
).replace("IMAGE", IMAGE)
SPECIAL = [
    "<|endoftext|>",
    "<|im_end|>",
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
IMAGE_TOKEN, VIDEO_TOKEN = SPECIAL.index("<|image_pad|>"), SPECIAL.index("<|video_pad|>")
TEXT = dict(
    vocab_size=272,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=96,
    max_position_embeddings=1024,
    initializer_range=0.15,  # large enough that log-probs differ from token to token
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
TOKENS = dict(image_token_id=IMAGE_TOKEN, video_token_id=VIDEO_TOKEN, vision_start_token_id=3, vision_end_token_id=4)
TOWER = dict(depth=3, hidden_size=32, num_heads=2, intermediate_size=48, out_hidden_size=64, initializer_range=0.15)
PATCH = {"qwen2.5-vl": 14, "qwen3-vl": 16}


def config(kind: str):
    """kind: a family, with "-tied" behind it if the output head is the embedding."""
    import transformers

    family, tied, _ = kind.partition("-tied")
    more = TOKENS | dict(tie_word_embeddings=bool(tied))
    if family == "qwen2.5-vl":
        rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
        tower = TOWER | dict(patch_size=14, window_size=56, fullatt_block_indexes=[1])
        text = TEXT | dict(rope_parameters=rope, tie_word_embeddings=bool(tied))
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=tower, **more)
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 1e4}
    tower = TOWER | dict(patch_size=16, num_position_embeddings=16, deepstack_visual_indexes=[0, 1])
    text = TEXT | dict(rope_parameters=rope, head_dim=32)
    return transformers.Qwen3VLConfig(text_config=text, vision_config=tower, **more)


def tokenizer():
    """One token a byte behind the special ones, with a chat template that takes images."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(ByteLevel.alphabet())])}
    names = dict(pad_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token=None, bos_token=None)
    made = Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=SPECIAL[2:], **names)
    made.chat_template = CHAT_TEMPLATE
    return made


def save(kind: str, path: Path, seed: int = 0, largest: int = 64) -> str:
    """The model, its tokenizer and the preparation of its images, of at most `largest` tokens each."""
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(config(kind)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    patch = PATCH[kind.removesuffix("-tied")]
    square = (2 * patch) ** 2  # pixels of a token
    size = {"shortest_edge": square, "longest_edge": square * largest}
    Qwen2VLImageProcessorPil(patch_size=patch, size=size).save_pretrained(path)
    return str(path)


def picture(seed: int, width: int = 90, height: int = 60, format: str = "PNG", **options) -> bytes:
    """A file with an image of random blocks."""
    from PIL import Image

    rng = random.Random(seed)
    small = Image.frombytes("RGB", (6, 5), rng.randbytes(6 * 5 * 3))
    out = io.BytesIO()
    small.resize((width, height), Image.Resampling.NEAREST).save(out, format, **options)
    return out.getvalue()


def row(text: str, *pictures: object, truth: str = "1", source: str = "demo") -> dict:
    """In verl's layout."""
    prompt = [{"role": "user", "content": text}]
    return {"data_source": source, "prompt": prompt, "images": list(pictures), "reward_model": {"ground_truth": truth}}


def prompt(path: str, text: str, *pictures: bytes):
    """(token ids, Images or None) of a user's message to the model at `path`: the pictures, then the text."""
    from types import SimpleNamespace

    from transformers import AutoConfig, AutoTokenizer

    from rl.vision import ImagePrep

    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    ids = AutoTokenizer.from_pretrained(path).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    prep = ImagePrep.of(path, AutoConfig.from_pretrained(path), SimpleNamespace(min_pixels=None, max_pixels=None))
    return prep.expand(ids, pictures) if pictures else (ids, None)


def write(path: Path, *rows: dict) -> str:
    """A parquet file, with images as datasets stores them."""
    from datasets import Dataset, Features, List, Value
    from datasets import Image as Feature

    message = {"role": Value("string"), "content": Value("string")}
    columns = {"data_source": Value("string"), "prompt": List(message), "images": List(Feature())}
    features = Features(columns | {"reward_model": {"ground_truth": Value("string")}})
    listed = {name: [row[name] for row in rows] for name in features}
    Dataset.from_dict(listed, features=features).to_parquet(path)
    return str(path)
