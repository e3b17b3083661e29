"""Tests. Fixtures are in conftest.py, what tests share besides in support/; test modules import nothing from each other."""

import pytest

pytest.register_assert_rewrite("tests.support")  # its assertions show their values too
