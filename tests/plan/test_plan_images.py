"""Images in the plan: tokens and pixels for a given size or from the data's headers, and the memory of the vision tower."""

import numpy as np
import pytest
from test_plan_memory import FLAGS, check_equal
from tiny_vlm import config, picture, pixels_of, png, row, save_image_processor, save_tokenizer, save_vlm

import train_sync
from rl import parts
from rl.data.image_prompts import ImagePrep
from rl.errors import UserError
from rl.model.pretrained import load_config
from tools.plan.fake_device import FakeDevice
from tools.plan.images import prompts_with_images

KINDS = ["qwen3-vl", "qwen2.5-vl"]


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, str]:
    """kind -> a directory without weights."""
    root = tmp_path_factory.mktemp("vlms")
    for kind in KINDS:
        config(kind).save_pretrained(root / kind)
        save_image_processor(kind, root / kind, 2**17)
        save_tokenizer(root / kind)
    return {kind: str(root / kind) for kind in KINDS}


def planned(path: str, size: str | None, tokens: int = 200, **flags):
    args = parts.make(train_sync.Args, model=path, **flags)
    return prompts_with_images(args, path, load_config(path), size, tokens, FakeDevice())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stated_size_takes_the_tokens_and_pixels_of_such_images(configs, kind):
    """They equal those of a prepared picture of this size. Each prompt has another image."""
    path = configs[kind]
    whole = ImagePrep(path, load_config(path))
    for width, height, number in ((100, 80, 1), (300, 90, 2), (1000, 700, 1)):
        prompt = planned(path, f"{width}x{height}x{number}")
        pixels, grid = whole.prepare([png(picture(width, height))] * number)
        ids, images = prompt(3)
        assert len(ids) == 200 and (ids == whole.image_token).sum() == grid.prod(1).sum() // whole.merge**2
        assert np.array_equal(images.grid, grid) and pixels_of(images).shape == pixels.shape
        assert ids[images.places].tolist() == [whole.image_token] * len(images.places)
        assert not set(images.digests) & set(prompt(4)[1].digests) and len(set(images.digests)) == number
        assert prompt(3)[1].digest == images.digest


def test_images_of_the_data(configs, tmp_path):
    """Prompts come in the run's own order with the sizes in their headers, even if the data behind a header is damaged."""
    import datasets

    sizes = [(64, 64), (200, 100), (90, 300)]
    rows = [row("<image>how many?" + "!" * n, [picture(*size)]) for n, size in enumerate(sizes)] + [row("none", [])]
    rows[1]["images"][0]["bytes"] = rows[1]["images"][0]["bytes"][:60]  # the header alone
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    flags = {"train_files": (str(tmp_path / "rows.parquet"),), "max_prompt_length": 300, "shuffle": False}
    prompt = planned(configs["qwen3-vl"], "data", **flags)
    grids = [None if images is None else images.grid.tolist() for _, images in map(prompt, range(4))]
    assert grids == [[[1, 4, 4]], [[1, 6, 12]], [[1, 18, 6]], None]
    assert len(prompt(1)[0]) == len(prompt(0)[0]) + 1 + (18 - 4) and prompt(4)[1].grid.tolist() == grids[0]
    assert pixels_of(prompt(1)[1]).shape == (72, 3 * 2 * 16 * 16)


@pytest.mark.parametrize(
    ("size", "said"),
    {
        None: "the model takes images. Give the size",
        "large": "--image-size large: not a size",
        "10x": "--image-size 10x: not a size",
        "0x7": "--image-size 0x7: not a size",
        "1000x700x3": "takes 117 tokens, and 3 of them do not fit into --max-prompt-length 200",
        "3000x10": "--image-size: an image has 3000 x 10 pixels",
    }.items(),
)
def test_sizes_that_cannot_be(configs, size, said):
    with pytest.raises(UserError, match=said):
        planned(configs["qwen3-vl"], size)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_count_with_images_is_that_of_real_tensors(tmp_path, kind):
    flags = {"images": True, "freeze_vision_tower": kind == "qwen2.5-vl", "gradient_checkpointing": kind == "qwen3-vl"}
    flags |= {"kl_loss_coef": 0.0, "lengths": [40, 33]}
    assert check_equal(save_vlm(kind, tmp_path), FLAGS | flags)["causes"]["images"] > 0
