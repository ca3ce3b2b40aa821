"""Images in real vLLM on a CPU: log-probs, the tower's weights and swaps, compared with transformers, for both model families.

The measuring is in tests/tools/vllm_image_checks.py, a process of its own for each engine; here are the bounds.
"""

import pytest
from test_engine_vllm import Measuring
from tiny_vlm import save_vlm

pytestmark = pytest.mark.timeout(600)

FAMILIES = ["qwen3-vl", pytest.param("qwen2.5-vl", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=FAMILIES)
def measured(request, tmp_path_factory):
    root, kind = tmp_path_factory.mktemp("vllm-images"), request.param
    save_vlm(kind, root / kind)
    runs = {name: (name, kind, 1) for name in ("publishes", "in_flight")}
    with Measuring(root, "tests/tools/vllm_image_checks.py", runs) as measuring:
        yield measuring


def test_every_publish_takes_effect(measured):
    """Each changes the tower, the text model, or both."""
    got = measured("publishes")
    assert got["start"]["error"] < 1e-4 and got["start"]["wrong"] == []
    for version, part in enumerate(("tower", "text", "both", "tower"), start=1):
        of_one = got[f"{version} {part}"]
        assert of_one["error"] < 1e-4 and of_one["versions"] == [version]
        assert of_one["wrong"] == [], "read back bit for bit"
        assert of_one["error against the old model"] > 1e-2, "or a missed publish would not show"
    tower = [name for name in got["names"] if name.startswith("model.visual.")]
    assert any("attn.qkv" in name for name in tower) and any("patch_embed" in name for name in tower)


def test_no_version_profiles_a_processor_that_prepared_images_do_not_have(monkeypatch):
    """On an accelerator the memory of images is measured where vLLM knows that pixels are normalised; older versions would ask
    transformers' processor, and a CPU measures nothing."""
    import vllm

    from rl.generation.vllm.images import PreparedImages

    prepared = object.__new__(PreparedImages)
    assert prepared.settings(True)["skip_mm_profiling"] is False and prepared.settings(False)["skip_mm_profiling"] is True
    fields = {name: field for name, field in vllm.EngineArgs.__dataclass_fields__.items() if name != "mm_device_do_normalize"}
    monkeypatch.setattr(vllm.EngineArgs, "__dataclass_fields__", fields)
    older = prepared.settings(True)
    assert older["skip_mm_profiling"] is True and "mm_device_do_normalize" not in older


def test_files_of_every_kind_are_seen_as_the_learner_sees_them(measured):
    got = measured("publishes")["odd"]
    assert len(got) == 7 and max(got.values()) < 1e-4, got


def test_an_image_token_in_a_response_is_text(measured):
    assert measured("publishes")["marks"]["error"] < 1e-4


def test_equal_ids_with_another_image_share_no_kv(measured):
    got = measured("publishes")["shared"]
    assert got["apart"] > 1e-2 and got["first"] < 1e-4 and got["again"] < 1e-4


@pytest.mark.parametrize("how", ["kept", "recomputed"])
@pytest.mark.parametrize("part", ["tower", "both"])
def test_a_publish_in_flight(measured, part, how):
    """With the KV kept, the image keeps the old tower's keys and values. With the KV recomputed, the new tower sees it."""
    got = measured("in_flight")[f"{part}, {how}"]
    assert max(got["before"], got["after"], got["waited"]) < 1e-4
    assert got["versions"] == [[0] * 5 + [1] * 7] * 3 + [[1] * 12]


@pytest.mark.slow
def test_tensor_parallel_ranks_see_the_same_images(tmp_path):
    save_vlm("qwen3-vl", tmp_path / "model")
    with Measuring(tmp_path, "tests/tools/vllm_image_checks.py", {"two": ("tensor_parallel", "model", 2)}) as measuring:
        got = measuring("two")
    assert got["ranks agree"] and got["before"] < 1e-4 and got["after"] < 1e-4


@pytest.mark.slow
def test_a_mixture_of_experts_that_takes_images(tmp_path):
    """vLLM stores the experts transposed, and reports the chosen experts of image tokens too."""
    save_vlm("qwen3-vl-moe", tmp_path / "model")
    with Measuring(tmp_path, "tests/tools/vllm_image_checks.py", {"moe": ("mixture", "model", 1)}) as measuring:
        got = measuring("moe")
    for of_one in got.values():
        assert of_one["error"] < 1e-4 and of_one["wrong"] == [] and of_one["elsewhere"] == 0, got
