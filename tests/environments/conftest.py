"""What the tests of environments share: a model of one token a byte, and pools that end with their test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from families import tokenizer_of


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tokenizer_of("qwen2_5").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def tokenizer():
    return tokenizer_of("qwen2_5")


@pytest.fixture
def make_pool(model) -> Iterator[Callable]:
    """Starts environments, by default those of rude.py."""
    from test_pool import environments

    with ExitStack() as pools:
        yield lambda *spec, **flags: pools.enter_context(closing(environments(model, *spec, **flags)))
