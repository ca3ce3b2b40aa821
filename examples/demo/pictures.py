"""The demo with images: a vision-language model of about 0.6M parameters that reads a drawn two-digit number.

`--model demo-vl` is a tiny Qwen3-VL, `--train-files demo-vl` its data. As in sums.py it is taught to answer right and then
mostly wrong. Before that only the tower is taught to tell digits apart, which makes the rest ten times as fast. All
prompts have the same tokens: an engine or a learner that mixes up two pictures is right once in 90 times.
"""

import io
import random
import string

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from examples.demo import sums as demo
from examples.demo.sums import Phase

SIZES = {"train": 1000, "val": 250}  # pictures of each split
SIDE = 64  # of a picture, in pixels
PATCH, MERGE = 16, 2  # pixels of a patch's side, patches of an image token's side
IMAGE_TOKENS = (SIDE // PATCH // MERGE) ** 2
QUESTION = "Number?"
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHARACTERS = string.digits + string.ascii_letters + "?"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# The bars of a digit in a box of 1 x 2, from (x, y) to (x, y), and the bars that each digit has, as on a pocket calculator.
BARS = [((0, 0), (1, 0)), ((0, 0), (0, 1)), ((1, 0), (1, 1)), ((0, 1), (1, 1)), ((0, 1), (0, 2)), ((1, 1), (1, 2))]
BARS += [((0, 2), (1, 2))]
DIGITS = ["1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011"]


def draw(number: int, lower: bool, rng: random.Random) -> Image.Image:
    """The number's two digits in bars, in the picture's lower or upper half; place, size and colours differ a little."""
    ink, paper = ([rng.randrange(low, low + 90) for _ in range(3)] for low in (0, 165))
    picture = Image.new("RGB", (SIDE, SIDE), tuple(paper))
    canvas = ImageDraw.Draw(picture)
    side, thickness = rng.randint(9, 11), rng.randint(2, 3)  # a digit is as wide as its side, twice as high
    top = SIDE // 2 * lower + rng.randint(3, SIDE // 2 - 2 * side - 4)
    for place, digit in enumerate(str(number)):
        left = SIDE // 2 * place + rng.randint(7, 13)
        for bar, drawn in zip(BARS, DIGITS[int(digit)], strict=True):
            if drawn == "1":
                ends = [(left + side * x, top + side * y) for x, y in bar]
                canvas.line(ends, tuple(ink), thickness)
    return picture


def problems(split: str) -> list[dict]:
    """The pictures of a split ("train" or "val") with a question each, in verl's layout. Every call draws the same pictures."""
    rng = random.Random(f"demo-vl/{split}")
    rows = []
    for i in range(SIZES[split]):
        number = rng.randint(10, 99)
        lower = rng.random() < 0.5
        png = io.BytesIO()
        draw(number, lower, rng).save(png, "PNG")
        rows.append(
            {
                "data_source": "demo",
                "prompt": [{"role": "user", "content": f"<image>{QUESTION}"}],
                "images": [{"bytes": png.getvalue(), "path": None}],
                "reward_model": {"style": "rule", "ground_truth": str(number)},
                "extra_info": {"split": split, "index": i, "lower": lower},
            }
        )
    return rows


def build_tokenizer() -> Qwen2Tokenizer:
    return demo.tokenizer_of(demo.SPECIAL + VISION, CHARACTERS, CHAT_TEMPLATE)


def build_processor() -> Qwen2VLImageProcessorPil:
    """Cuts pictures into patches as Qwen's own processor does, but into smaller ones."""
    sizes = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 64 * (PATCH * MERGE) ** 2}  # areas, in pixels
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=sizes, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen3VLForConditionalGeneration:
    text = dict(
        vocab_size=len(tokenizer),
        num_hidden_layers=3,
        head_dim=32,
        intermediate_size=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        **demo.SHAPE,
    )
    vision = dict(
        depth=2,
        hidden_size=64,
        num_heads=4,
        intermediate_size=128,
        out_hidden_size=128,
        patch_size=PATCH,
        spatial_merge_size=MERGE,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
        initializer_range=demo.SHAPE["initializer_range"],
    )
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(VISION), strict=True))
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    return Qwen3VLForConditionalGeneration(config)


def make(directory: str) -> None:
    """Teaches and saves the model."""
    tokenizer = build_tokenizer()
    processor = build_processor()
    model = build_model(tokenizer)
    _teach(model, tokenizer, processor)
    demo.save(model, directory, tokenizer)
    processor.save_pretrained(directory)


def _teach(model, tokenizer, processor, tower_steps: int = 160, right_steps: int = 160, wrong_steps: int = 60) -> None:
    rows = problems("train")
    rng = random.Random(0)
    pictures = [Image.open(io.BytesIO(row["images"][0]["bytes"]), formats=["PNG"]) for row in rows]
    patches = [processor(picture, return_tensors="pt")["pixel_values"] for picture in pictures]
    pixels = torch.stack(patches)  # [rows, patches, d]
    numbers = [int(row["reward_model"]["ground_truth"]) for row in rows]

    def tower_loss() -> torch.Tensor:
        batch = rng.sample(range(len(rows)), 24)
        return _tower_loss(model, tokenizer, pixels[batch], [rows[i] for i in batch])

    def loss(share_right: float) -> torch.Tensor:
        batch = rng.sample(range(len(rows)), 24)
        answers = [numbers[i] if rng.random() < share_right else misread(numbers[i], rng) for i in batch]
        return _demonstration_loss(model, tokenizer, pixels[batch], answers)

    phases = [
        Phase("the tower", tower_steps, tower_loss, 1.5e-3, 0.95),
        Phase("right answers", right_steps, lambda: loss(1), 1.5e-3, 0.95),
        Phase("wrong answers", wrong_steps, lambda: loss(0.2), 5e-4, 0.95, falling=False),
    ]
    demo.train_in(model, phases, "making the demo-vl model (once)")


def misread(number: int, rng: random.Random) -> int:
    """A two-digit number that is ten more or ten less."""
    return rng.choice([other for other in (number - 10, number + 10) if 10 <= other <= 99])


def prompt_ids(tokenizer: Qwen2Tokenizer) -> list[int]:
    """Token ids of every prompt, the generation prompt included."""
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    ids = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    place = ids.index(tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    return ids[:place] + [ids[place]] * IMAGE_TOKENS + ids[place + 1 :]


def _tower_loss(model, tokenizer, pixels: torch.Tensor, rows: list[dict]) -> torch.Tensor:
    """Cross-entropy of what each quarter of a picture shows, predicted by the tower alone. pixels [B, patches, d]."""
    shown = []
    for row in rows:
        digits = tokenizer.convert_tokens_to_ids(list(row["reward_model"]["ground_truth"]))
        blank = [tokenizer.pad_token_id] * 2
        shown += blank + digits if row["extra_info"]["lower"] else digits + blank
    features = model.model.get_image_features(pixels.flatten(0, 1), _grid(len(rows)), return_dict=True).pooler_output
    return F.cross_entropy(model.lm_head(torch.cat(features)), torch.tensor(shown))


def _demonstration_loss(model, tokenizer, pixels: torch.Tensor, answers: list[int]) -> torch.Tensor:
    """Cross-entropy of the answers' digits and the end token. pixels [B, patches, d]; all rows have one length L."""
    prompt = prompt_ids(tokenizer)
    ends = [[*tokenizer.convert_tokens_to_ids(list(str(answer))), tokenizer.eos_token_id] for answer in answers]
    ids = torch.tensor([prompt + end for end in ends])  # [B, L]
    kinds = (ids == model.config.image_token_id).int()  # 1 where an image token stands
    vision = {"pixel_values": pixels.flatten(0, 1), "image_grid_thw": _grid(len(answers)), "mm_token_type_ids": kinds}
    logits = model(input_ids=ids, **vision).logits
    trained = slice(len(prompt) - 1, -1)  # the positions that predict the answer
    return F.cross_entropy(logits[:, trained].flatten(0, 1), ids[:, len(prompt) :].flatten())


def _grid(pictures: int) -> torch.Tensor:
    """[pictures, 3]: frames, rows and columns of patches."""
    return torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]] * pictures)
