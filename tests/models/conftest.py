"""What the tests of models share."""

import pytest
import transformers


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """No hints about rotary factors of such small models, nor about kernels that are not installed."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)
