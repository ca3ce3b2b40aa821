"""Images with sequence and expert parallelism: gradients, metrics and updates equal those of one rank."""

from types import SimpleNamespace

import pytest
import torch
from layouts import ALONE, assert_taught_the_same, learn_on
from test_vision import rows  # noqa: F401  (a fixture)
from tiny_vlm import save_vlm

from rl.model.vision_forward import RowImages

SIZES = [[5, 3], [8, 2, 4], [6, 6], [3, 9], [1, 7]]  # of the responses to each row: 1, 2, 0, 1 and 1 images
CASES = {
    # A larger rate makes as much difference between two cuts on one rank: AdamW steps as far where a gradient is rounding.
    "two updates": ({"ppo_mini_batch_size": 3, "lr": 5e-6}, SIZES),
    "turns, kl loss, entropy": ({"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.1}, SIZES),
    "one image": ({"entropy_coeff": 0.1}, SIZES[:1]),
    "frozen": ({"freeze_vision_tower": True, "entropy_coeff": 0.1}, SIZES),
}
TIGHT = {"max_tokens_per_micro_batch": 40, "gradient_checkpointing": True}
ROOMIER = {"max_tokens_per_micro_batch": 80}  # for a rank that has each sequence for itself


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """With heads for four ranks."""
    root, heads = tmp_path_factory.mktemp("vlms"), {"num_attention_heads": 4}
    smaller = heads | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    text = {"qwen2.5-vl": smaller, "qwen3-vl": heads, "qwen3-vl-moe": heads}
    return {kind: save_vlm(kind, root / kind, max_pixels=2**14, **more) for kind, more in text.items()}


@pytest.mark.runs
def test_two_ranks_that_share_rows_are_taught_what_one_rank_is(models, rows):  # noqa: F811
    of = {"case": CASES["two updates"]}
    alone = learn_on(1, {"alone": [models["qwen3-vl"], ALONE]}, of, rows=rows)
    found = learn_on(2, {"sp 2": [models["qwen3-vl"], {"sequence_parallel": 2} | TIGHT]}, of, rows=rows)
    assert_taught_the_same(found, alone)


@pytest.mark.runs
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2.5-vl", "qwen3-vl"])
def test_ranks_that_share_rows_are_taught_what_one_rank_is(models, rows, kind):  # noqa: F811
    """Rows without images, and more ranks than images, among them."""
    alone = learn_on(1, {"alone": [models[kind], ALONE]}, CASES, rows=rows)
    sharing = {size: {"sequence_parallel": size} for size in (2, 4)}
    layouts = {"tight": [models[kind], sharing[4] | TIGHT], "roomy": [models[kind], sharing[4] | ALONE]}
    layouts |= {"2 x 2": [models[kind], sharing[2] | TIGHT]}
    assert_taught_the_same(learn_on(4, layouts, CASES, rows=rows), alone)


@pytest.mark.runs
@pytest.mark.slow
def test_experts_and_images_over_ranks(models, rows):  # noqa: F811
    alone = learn_on(1, {"alone": [models["qwen3-vl-moe"], ALONE]}, CASES, rows=rows)
    flags = {
        "data": TIGHT | ROOMIER,
        "ep 2": {"expert_parallel": 2} | TIGHT | ROOMIER,
        "sp 2, ep 4": {"sequence_parallel": 2, "expert_parallel": 4} | TIGHT,
        "sp 4, ep 2": {"sequence_parallel": 4, "expert_parallel": 2} | ALONE,
    }
    layouts = {name: [models["qwen3-vl-moe"], of] for name, of in flags.items()}
    assert_taught_the_same(learn_on(4, layouts, CASES, rows=rows), alone)


def test_a_rank_computes_the_images_of_its_piece():
    """Images of 2, 1 and 3 tokens; the first one is in two prompts, the last one lies across the border."""
    files = [(SimpleNamespace(token_counts=[2, 1, 3]), number) for number in range(3)]
    grid = torch.tensor([[1, 2, 4], [1, 2, 2], [1, 2, 6]])
    places, feature = torch.tensor([1, 2, 4, 8, 9, 10, 12, 13]), torch.tensor([0, 1, 2, 3, 4, 5, 0, 1])
    row = RowImages(grid, places, feature, files)
    first, second, third = (row.within(begin, begin + 10) for begin in (0, 10, 20))
    assert first.files == files and first.places.tolist() == [1, 2, 4, 8, 9] and first.feature.tolist() == [0, 1, 2, 3, 4]
    assert second.files == [files[0], files[2]] and second.grid.tolist() == [[1, 2, 4], [1, 2, 6]]
    assert second.places.tolist() == [0, 2, 3] and second.feature.tolist() == [4, 0, 1]
    assert third.files == [] and third.grid.shape == (0, 3) and not len(third.places)
