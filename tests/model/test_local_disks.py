"""A model on the nodes' own disks: all have the same weights, or those that lack them are sent them."""

import shutil

import pytest
from nodes import Network, Unavailable


@pytest.fixture
def network(tmp_path):
    """Two nodes; tmp_path/own is another directory on each."""
    (tmp_path / "own").mkdir()
    try:
        with Network(2, own=tmp_path / "own") as network:
            yield network
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weights_that_are_others_on_the_second_node_are_refused_and_missing_ones_are_sent(network, demo_model, tmp_path):
    copies = [tmp_path / "own" / f"node{number}" / "model" for number in (1, 2)]
    for copy in copies:
        shutil.copytree(demo_model, copy)
    file, own = copies[1] / "model.safetensors", tmp_path / "own"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    flags = ["train_async.py", "--model", own / "model", "--output-dir", tmp_path / "runs", "--total-training-steps", 1]
    flags += ["--train-files", "demo", "--no-val-before-train", "--generators"]
    nodes = [(2, [*flags, 1]), (1, [*flags, 0])]  # engines want the whole model, where they are
    (code, console), _ = network.start(nodes).wait(250)
    assert code == 1 and f"--model {own}/model: model.safetensors on node2 is not the file that node1 has" in console, console
    file.unlink()
    consoles = network.start(nodes).wait(250)
    assert [code for code, _ in consoles] == [0, 0], consoles
