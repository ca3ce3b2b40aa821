"""Image files of every kind are decoded the same way everywhere. An error names the row of an unusable image."""

import io
import random
import zlib

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import GSM8K
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, PngImagePlugin
from test_vision import KINDS, dataset, vlms  # noqa: F401  (fixtures)
from tiny_vlm import picture, pixels_of, row
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from rl.data import image_prompts, images
from rl.data.prompts import PromptOrder
from rl.errors import ImageError, UserError
from rl.learning.batch_images import _THREAD, BatchImages
from rl.learning.micro_batches import MicroBatch
from rl.model.loading import load_weights
from rl.model.policy import Policy


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    image.save(out := io.BytesIO(), format, **options)
    return out.getvalue()


def exif(orientation: int) -> Image.Exif:
    out = Image.Exif()
    out[0x0112] = orientation
    return out


SEEN = np.asarray(picture(40, 30, seed=5))  # [30, 40, 3]
TURNED = {1: SEEN, 3: SEEN[::-1, ::-1], 6: SEEN.transpose(1, 0, 2)[::-1], 8: SEEN.transpose(1, 0, 2)[:, ::-1]}


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", TURNED)
def test_an_image_that_exif_turns_is_seen_upright(format, orientation):
    """TURNED: how a camera stores a picture so that its EXIF turns it upright."""
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(Image.fromarray(TURNED[orientation]), format, exif=exif(orientation), **options)
    assert images.size(data) == (40, 30) and np.array_equal(images.to_rgb(data), SEEN)


def test_exif_behind_the_pixels_turns_neither_size_nor_image():
    """A header does not have it: tokens are counted and pixels made by the same rule."""
    data = encoded(Image.fromarray(SEEN))
    chunk = PngImagePlugin.putchunk
    tail = io.BytesIO()
    chunk(tail, b"eXIf", exif(6).tobytes()[6:])
    end = data.rindex(b"IEND") - 4
    data = data[:end] + tail.getvalue() + data[end:]
    assert images.size(data) == (40, 30) and images.to_rgb(data).shape == (30, 40, 3)


def flat(mode: str, **options) -> bytes:
    """A picture that is red on the left and transparent, without a colour, on the right."""
    image = Image.new("RGBA", (20, 10), (0, 0, 0, 0))
    if mode == "P":
        image = Image.new("P", (20, 10), 0)
        image.putpalette([0, 0, 0, 255, 0, 0])
        options["transparency"] = 0
    image.paste(1 if mode == "P" else (255, 0, 0, 255), (0, 0, 10, 10))
    return encoded(image, **options)


@pytest.mark.parametrize("data", [flat("RGBA"), flat("P"), flat("RGBA", format="WEBP", lossless=True), flat("P", format="GIF")])
def test_what_is_transparent_is_white(data):
    seen = images.to_rgb(data)
    assert (seen[:, :10] == [255, 0, 0]).all() and (seen[:, 10:] == 255).all()


def test_grey_wide_printed_and_moving_images():
    grey = np.arange(200, dtype=np.uint8).reshape(10, 20)
    assert np.array_equal(images.to_rgb(encoded(Image.fromarray(grey))), grey[..., None].repeat(3, 2))
    wide = Image.fromarray(grey.astype(np.uint16) * 257)  # 16 bits a pixel
    assert np.array_equal(images.to_rgb(encoded(wide)), grey[..., None].repeat(3, 2))
    assert images.to_rgb(encoded(Image.fromarray(SEEN).convert("CMYK"), "TIFF")).shape == SEEN.shape
    frames = [Image.new("RGB", (9, 9), color) for color in ("red", "blue")]
    moving = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (images.to_rgb(moving) == [255, 0, 0]).all()


RGB, LAB = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
GREY = np.arange(200).reshape(10, 20)
DEEP = {  # an image whose values are not of 8 bits -> the grey that is seen; None: nothing says which value is white
    "floats to 1": (GREY.astype(np.float32) / 255, "TIFF", GREY),
    "floats to 1, portable": (GREY.astype(np.float32) / 255, "PPM", GREY),
    "floats to 255": (GREY.astype(np.float32), "TIFF", GREY),
    "floats of black and white": (GREY.astype(np.float32) // 199, "TIFF", GREY // 199 * 255),
    "floats below 0": (GREY.astype(np.float32) - 1, "TIFF", None),
    "floats beyond 255": (GREY.astype(np.float32) * 2, "TIFF", None),
    "a float that is none": (np.where(GREY == 5, np.nan, GREY).astype(np.float32), "TIFF", None),
    "an infinite float": (np.where(GREY == 5, np.inf, GREY).astype(np.float32), "TIFF", None),
    "16 bits": (GREY.astype(np.uint16) * 257, "TIFF", GREY),
    "16 bits, portable": (GREY.astype(np.uint16) * 257, "PPM", GREY),
    "16 bits in 32": (GREY.astype(np.int32) * 257, "TIFF", GREY),
    "32 bits": (GREY.astype(np.int32) << 23, "TIFF", None),
    "negative": (GREY.astype(np.int32) - 1, "TIFF", None),
}


@pytest.mark.parametrize("case", DEEP)
def test_images_of_more_than_8_bits(case):
    values, format, seen = DEEP[case]
    data = encoded(Image.fromarray(values), format)
    if seen is None:
        with pytest.raises(ImageError, match=r"has values from \S+ to \S+, .*save it with 8 or 16 bits"):
            images.to_rgb(data)
    else:
        assert np.array_equal(images.to_rgb(data), seen[..., None].repeat(3, 2))


MODES = {"TIFF": ["1", "L", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "LA", "PA", "I;16", "I;16B"]}
MODES |= {"PNG": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"], "GIF": ["1", "L", "P"], "JPEG": ["L", "RGB", "CMYK", "YCbCr"]}


@pytest.mark.parametrize(("format", "mode"), [(format, mode) for format, modes in MODES.items() for mode in modes])
def test_black_and_white_in_every_mode(format, mode):
    for value in (0, 255):
        grey = Image.new("L", (8, 8), value)
        wide = Image.fromarray(np.full((8, 8), value * 257, np.uint16))
        to = {"PA": "P", "RGBX": "RGB", "LAB": "RGB", "I;16B": "I;16"}.get(mode, mode)
        image = wide if mode.startswith("I") else grey.convert(to)
        if mode == "LAB":
            image = ImageCms.applyTransform(image, ImageCms.buildTransform(RGB, LAB, "RGB", "LAB"))
        elif mode in ("PA", "RGBX"):
            image = image.convert(mode)
        seen = images.to_rgb(encoded(image, format)).astype(int)
        assert abs(seen - value).max() <= 2


@settings(max_examples=60)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "TIFF"]), st.integers(0, 2**32))
def test_damage_is_an_image_error_or_an_image(format, seed):
    """A file with a few changed bytes or a missing end gives an image or an ImageError, nothing else."""
    rng = random.Random(seed)
    data = bytearray(encoded(Image.fromarray(SEEN), format))
    for _ in range(rng.randint(0, 3)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    data = bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
    for act in (images.size, images.to_rgb):
        try:
            act(data)
        except ImageError as error:
            assert str(error) and "\n" not in str(error)


def test_a_huge_image_is_refused_by_its_header():
    data = bytearray(encoded(Image.new("L", (8, 8))))
    data[16:24] = (30_000).to_bytes(4, "big") * 2
    header = data[12:29]
    data[29:33] = zlib.crc32(header).to_bytes(4, "big")
    with pytest.raises(ImageError, match=r"30000 x 30000 pixels, more than|exceeds limit"):
        images.size(bytes(data))


# ------------------------------------------------------------------------------------------------ rows and tokens


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_and_tokens_are_those_of_transformers(vlms, kind):  # noqa: F811
    """For plain images, which both libraries decode alike. Tokens are counted from the header alone."""
    prep = image_prompts.ImagePrep(vlms[kind], AutoConfig.from_pretrained(vlms[kind]))
    theirs = AutoImageProcessor.from_pretrained(vlms[kind], backend="pil")
    for width, height in [(90, 60), (3, 40), (400, 30), (700, 500), (1, 1)]:
        image = picture(width, height, seed=width)
        expected = theirs([image], return_tensors="pt")
        pixels, grid = prep.prepare([encoded(image)])
        assert torch.equal(pixels, expected["pixel_values"]) and torch.equal(grid, expected["image_grid_thw"])
        assert prep.grid(width, height) == tuple(grid[0].tolist())
        assert prep.count(width, height) == int(grid[0].prod()) // 4


def broken(**image) -> dict:
    good = row("<image>How many?", [picture(90, 60)])
    return {**good, "images": [image]}


BAD = {  # rows -> what is said
    "no image for a place": ([row("<image> and <image>", [picture(90, 60)])], "row 0: the prompt has 2 places.* has 1 images"),
    "no place for an image": ([row("How many?", [picture(90, 60)])], "row 0: the prompt has 0 places .* the row has 1 images"),
    "an image token in the text": ([row("<|image_pad|>", [])], "row 0: the prompt has 1 places .* the row has 0 images"),
    "no image file": ([broken(bytes=b"no image", path=None)], "row 0: image 0 is no image that can be read"),
    "a header cut short": ([broken(bytes=encoded(picture(9, 9))[:20], path=None)], "row 0: image 0 is no image that can"),
    "an absent file": ([broken(bytes=None, path="absent.png")], r"row 0: image 0 cannot be read \(No such file.*absent\.png"),
    "a URL": ([broken(bytes=None, path="https://a.b/c.png")], "row 0: image 0 is a URL"),
    "an empty one": ([broken(bytes=None, path=None)], "row 0: image 0 is empty"),
    "too narrow": ([row("<image>", [picture(1000, 2)])], "row 0: an image has 1000 x 2 pixels, which the model cannot take"),
    "too long": ([row("<image>" * 9, [picture(700, 700)] * 9)], "--max-prompt-length 100.*or lower max_pixels in"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_before_the_first_step(vlms, tmp_path, case):  # noqa: F811
    table, said = BAD[case]
    Dataset.from_list([*table, row("Fine.", [])]).to_parquet(file := tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=f"rows.parquet {said.removeprefix('rows.parquet ')}" if "row 0" in said else said) as e:
        dataset(vlms["qwen3-vl"], str(file), max_prompt_length=100)
    assert "\n" not in str(e.value)


def test_too_long_prompts_are_left_out_and_never_cut_through_an_image(vlms, tmp_path):  # noqa: F811
    Dataset.from_list([row("<image>" * 9, [picture(700, 700)] * 9), row("Fine.", [])]).to_parquet(
        file := tmp_path / "a.parquet"
    )
    assert len(dataset(vlms["qwen3-vl"], str(file), max_prompt_length=100, filter_overlong_prompts=True)) == 1
    for side in ("left", "right"):
        with pytest.raises(UserError, match=r"row 0: the prompt has .* tokens, more than"):
            dataset(vlms["qwen3-vl"], str(file), max_prompt_length=100, truncation=side)


def test_paths_are_relative_to_the_rows_file(vlms, tmp_path):  # noqa: F811
    (tmp_path / "pictures").mkdir()
    picture(90, 60).save(tmp_path / "pictures" / "a.png")
    rows = [{**row("<image>How many?", [picture(90, 60)]), "images": [path]} for path in ("pictures/a.png",)]
    Dataset.from_list(rows).to_parquet(file := tmp_path / "a.parquet")
    (by_path,) = dataset(vlms["qwen3-vl"], str(file))
    Dataset.from_list([row("<image>How many?", [picture(90, 60)])]).to_parquet(file)
    (by_bytes,) = dataset(vlms["qwen3-vl"], str(file))
    assert by_path.ids == by_bytes.ids and torch.equal(pixels_of(by_path.images), pixels_of(by_bytes.images))


def test_real_geometry_problems(vlms):  # noqa: F811
    file = GSM8K.parent / "geo3k" / "train.parquet"
    if not file.exists():
        pytest.skip(f"no geometry problems at {file}")
    for prompt in dataset(vlms["qwen3-vl"], str(file), max_prompt_length=1000):
        token = AutoConfig.from_pretrained(vlms["qwen3-vl"]).image_token_id
        assert prompt.ids.count(token) == len(prompt.images.places) == int(prompt.images.grid.prod()) // 4
        assert [prompt.ids[i] for i in prompt.images.places] == [token] * len(prompt.images.places)
        assert prompt.text.count("<|image_pad|>") == 1 and len(pixels_of(prompt.images)) == int(prompt.images.grid.prod())


# ------------------------------------------------------------------------------------------------------ the learner


def test_pixels_are_prepared_once_by_whoever_comes_first(vlms, tmp_path, monkeypatch):  # noqa: F811
    """The thread prepares the next row's pixels during a computation. Pixels beyond the limit are dropped and made again."""
    from test_vision import make_batch

    table = [row("<image>How many?", [picture(90, 60, seed)]) for seed in range(4)]
    Dataset.from_list(table).to_parquet(file := tmp_path / "a.parquet")
    prompts, made = dataset(vlms["qwen3-vl"], str(file)), []
    prepare = prompts.prep.prepare
    monkeypatch.setattr(prompts.prep, "prepare", lambda sources: (made.append(sources[0]), prepare(sources))[1])
    batch = make_batch(prompts, [9, 9])
    rows = [batch.images.inputs([len(prompts[g].ids)], [-1], [g], torch.device("cpu"))["images"] for g in range(4)]
    idle = lambda: _THREAD.submit(lambda: None).result()  # noqa: E731  (behind what the thread was asked for)
    idle()
    assert made == [prompts[0].images.sources[0]]
    first = [rows[0].pixels()]
    idle()
    assert made == [prompts[g].images.sources[0] for g in (0, 1)]
    first += [of.pixels() for of in rows[1:]]
    assert len(made) == 4
    monkeypatch.setattr(image_prompts, "KEPT_BYTES", 2 * first[0].nbytes)
    idle()
    prompts.prep._kept.clear()
    again = [of.pixels() for _ in range(2) for of in rows]
    assert all(torch.equal(a, b) for a, b in zip(first * 2, again, strict=True)) and len(made) > 4
    idle()
    assert sum(of.nbytes for of in prompts.prep._kept.values()) <= 3 * first[0].nbytes


def test_a_row_that_has_changed_is_not_trained(vlms, tmp_path):  # noqa: F811
    """The learner reads the rows again. Another image of the same size has the same ids."""
    from test_vision import make_batch

    file = tmp_path / "a.parquet"
    Dataset.from_list([row("<image>How many?", [picture(90, 60, 0)])]).to_parquet(file)
    batch = make_batch(dataset(vlms["qwen3-vl"], str(file)), [9, 9])
    Dataset.from_list([row("<image>How many?", [picture(90, 60, 1)])]).to_parquet(file)
    now = BatchImages(dataset(vlms["qwen3-vl"], str(file)), PromptOrder(1, 0, shuffle=False), batch.images.groups)
    with pytest.raises(RuntimeError, match=r"a\.parquet row 0: the prompt or its images are not what the generator"):
        now.inputs([9], [-1], [0], torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_towers_flops_are_those_that_torch_counts(vlms, kind):  # noqa: F811
    """A forward pass is a third of a training step. torch counts attention's products where they are plain ones."""
    model = load_weights(vlms[kind], torch.float32)
    grid = torch.tensor([[1, 8, 8], [1, 4, 12]])
    patches = grid.prod(1).tolist()
    vision_config = model.config.vision_config
    values = vision_config.in_channels * vision_config.temporal_patch_size * vision_config.patch_size**2
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.model.get_image_features(torch.randn(sum(patches), values), grid, return_dict=True)
    ours = image_prompts.tower_flops(model.config, patches, frozen=True)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert image_prompts.tower_flops(model.config, patches, frozen=False) == pytest.approx(3 * ours)
    ids = [9, *[model.config.image_token_id] * 16, 9, *[model.config.image_token_id] * 12, 9]
    assert image_prompts.image_sizes(model.config, ids) == patches


def test_eight_responses_hold_what_one_holds_of_an_image(vlms, tmp_path):  # noqa: F811
    """The test counts, by storage, everything that the tower keeps for its backward pass, including pixels."""
    from test_vision import make_batch

    Dataset.from_list([row("<image>How many?", [picture(90, 60)])]).to_parquet(file := tmp_path / "a.parquet")
    prompts, held = dataset(vlms["qwen3-vl"], str(file)), {}
    policy = Policy(load_weights(vlms["qwen3-vl"], torch.float32))
    base, weights = policy.model.model, {p.untyped_storage().data_ptr() for p in policy.parameters()}
    features = base.get_image_features
    for n in (1, 8):
        kept = {}

        def keep(tensor, kept=kept):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        def counted(*given, keep=keep, **how):
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                return features(*given, **how)

        base.get_image_features = counted
        micro = MicroBatch.of(make_batch(prompts, [9, 9], n=n), list(range(n)), torch.device("cpu"))
        log_prob, _ = policy(micro.inputs, micro.layout, micro.predict, micro.labels, 1.0, "none")
        held[n] = sum(kept.values())
        log_prob.sum().backward()
    assert held[8] == held[1] > pixels_of(prompts[0].images).nbytes
