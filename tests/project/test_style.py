"""The style check finds a phrase to avoid, and nothing else. Raw strings are not checked."""

from pathlib import Path

import pytest

from foredraft.scripts.style_check import complaints


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.py", 'def f():\n    """Return the mask."""\n\nbeside = 1  # next to it\n', []),
        ("a.py", 'x = 1\nraise ValueError(f"""{x}\nis no\nnumber""")\n', [3]),
        ("a.md", "One\nbeside another\n", [2]),
        ("a.yaml", r"key: 1  # so many", [1]),
        ("a.py", r"x = f'{begins[:4]} is no longer `beside` it', 'thoughts'", []),
        ("a.py", r"x = f'{begin} begins', 'two thoughts'", [1, 1]),
    ],
)
def test_complaints(tmp_path: Path, name: str, text: str, lines: list[int]) -> None:
    (tmp_path / name).write_text(text)
    assert [int(line.split(":")[1]) for line in complaints(str(tmp_path / name))] == lines
