"""Started by test_push.py: runs a script whose calls of the hub are written to $CALLS, with the files that would be uploaded.

python pushes.py SCRIPT FLAGS ...                           REFUSED, in the environment: the call that fails
"""

import json
import os
import runpy
import sys
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects


def act(name: str, **how) -> None:
    if name == os.environ.get("REFUSED"):
        raise ConnectionError("403: you may not")
    if folder := how.get("folder_path"):
        files = [str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()]
        how["files"] = sorted(filter_repo_objects(files, ignore_patterns=how["ignore_patterns"]))
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(json.dumps({"call": name, **how}, default=str) + "\n")


HfApi.create_repo = lambda _, repo, **how: act("create_repo", repo=repo, **how)
HfApi.upload_folder = lambda _, **how: act("upload_folder", **how)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
