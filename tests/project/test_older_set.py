"""Models, images, engines and experts work with the older transformers that vllm-ascend pins (requirements-npu.txt)."""

import os
import re
import subprocess

import pytest
from helpers import ROOT, environment


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_models_images_engines_and_experts_with_the_npu_sets_transformers(tmp_path):
    command = ["bash", "tests/tools/older_set.sh", "--this-torch", str(tmp_path), "-n", "0", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=880)
    if done.returncode == 77:
        pytest.skip(f"pip cannot install the older transformers here: {done.stderr.strip()[-300:]}")
    wanted = re.search(r"^transformers==(\S+)", (ROOT / "requirements-npu.txt").read_text(), re.MULTILINE)[1]
    assert f"transformers {wanted}{os.linesep}" in done.stdout
    assert done.returncode == 0, done.stdout[-6000:]
    assert not re.search(r"\bskipped\b", done.stdout), done.stdout[-3000:]
