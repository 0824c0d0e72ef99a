"""The model and tokens of `support.small_model`, for files that define no others.

The fixtures import it: pytest reads this file before `tests/conftest.py` has installed the checks of shapes.
"""

import pytest


@pytest.fixture(scope="module")
def model():
    from support import small_model

    return small_model.make()


@pytest.fixture(scope="module")
def tokens():
    from support import small_model

    return small_model.some_tokens()
