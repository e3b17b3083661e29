"""What all conformance checks share: what a user is refused, texts that must be alike, how a target is drafted for."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from foredraft.heads import Target


@contextmanager
def skipped_where_refused() -> Iterator[None]:
    """Skip a test with the sentence by which a user is refused, or that names a package which the model needs."""
    try:
        yield
    except (ValueError, ImportError) as error:
        pytest.skip("refused: " + str(error).strip().split("\n")[0])


def check_texts(texts: list[list[int]], expected: list[list[int]], what: str) -> None:
    """Raise RuntimeError with the place where each text first differs."""
    if texts != expected:
        pairs = [list(zip(*pair, strict=True)) for pair in zip(expected, texts, strict=True)]
        where = [next((i for i, (a, b) in enumerate(pair) if a != b), None) for pair in pairs]
        raise RuntimeError(f"{what}: another text, first different at {where}")


def support(target: Target) -> str:
    able = target.capabilities
    return "trees" if able.trees else "chains" if able.chains else "decoded plainly"
