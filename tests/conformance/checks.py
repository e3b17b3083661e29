"""What all conformance checks share: a row of checks that need one another, and texts that must be alike."""

from collections.abc import Callable, Iterator

Checks = Iterator[tuple[str, Callable[[], str | None]]]  # name and work, which may return a detail to be shown


def outcomes(checks: Checks) -> dict[str, str]:
    """Of each check "ok", "refused: " with the sentence that a user would get, or "FAILS: ". What follows a check that is not
    ok is not tried."""
    row: dict[str, str] = {}
    for name, work in checks:
        try:
            detail = work()
            row[name] = "ok" if detail is None else f"ok: {detail}"
        except (ValueError, ImportError) as error:  # of a package that the model needs
            row[name] = "refused: " + str(error).strip().split("\n")[0]
        except Exception as error:  # what a user would get as a traceback
            row[name] = f"FAILS: {type(error).__name__}: {str(error).strip()}".split("\n")[0]
        if not row[name].startswith("ok"):
            break
    return row


def check_texts(texts: list[list[int]], expected: list[list[int]], what: str) -> None:
    """Raises RuntimeError that says where each first differs."""
    if texts != expected:
        pairs = [list(zip(*pair, strict=True)) for pair in zip(expected, texts, strict=True)]
        where = [next((i for i, (a, b) in enumerate(pair) if a != b), None) for pair in pairs]
        raise RuntimeError(f"{what}: another text, first different at {where}")
