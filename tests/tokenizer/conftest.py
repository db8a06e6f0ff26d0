from __future__ import annotations

import pytest

from jaxserve.loading import ModelSource, load_tokenizer
from jaxserve.tokenizer import Tokenizer
from tests.demo import demo_source as find_demo


@pytest.fixture(scope="session")
def demo_source() -> ModelSource:
    return find_demo()


@pytest.fixture(scope="session")
def smollm(demo_source: ModelSource) -> Tokenizer:
    return load_tokenizer(demo_source)
