"""Check words in CHECKED, or in the named paths: `python -m scripts.style_check [PATH ...]`. ruff's D401 checks that
docstrings start with a verb."""

import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

CHECKED = ["conf", "foredraft", "heads", "inference", "scripts", "tests", "train"]
AVOID = (
    r"(?i)\b((?<!there\s)(is|are|holds?|knows?)\s+no(?!\s+longer)|as\s+it\s+is|(as|where)\s+they\s+are|where\s+there\s+(is|are)|of\s+(its|their)\s+own|beside"
    r"|begun|(?<![▁｜])begins?|flatters?|thoughts|whichever|hopeless|so\s+many|decodes?\s+plainly|plain\s+decoding|witness)\b"
)
KINDS = {"COMMENT", "STRING", "FSTRING_MIDDLE"}
NO_PROSE = r"""(?s)r["'].*|["']\w+["']"""  # a pattern, or a name
VALUE = r"\{[^{}\n]*\}"  # of an f-string; since Python 3.12 its tokens are separate


def complaints(path: str) -> Iterator[str]:
    """Yield a line for each phrase of AVOID."""
    text = Path(path).read_text(encoding="utf-8")
    prose = [(1, text)]
    if path.endswith(".py"):
        tokens: Iterator = tokenize.generate_tokens(iter(text.splitlines(True)).__next__)
        prose = [(token.start[0], token.string) for token in tokens if tokenize.tok_name[token.type] in KINDS]
        prose = [(line, re.sub(VALUE, "", part)) for line, part in prose if not re.fullmatch(NO_PROSE, part)]
    for line, part in prose:
        part = re.sub(r"`[^`\n]+`", "``", part)  # code is not prose
        for hit in re.finditer(AVOID, part):
            yield f"{path}:{line + part.count(chr(10), 0, hit.start())}: {hit[0]!r} is to be avoided"


if __name__ == "__main__":
    command = ["git", "ls-files", *(sys.argv[1:] or CHECKED)]
    files = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    found = [line for path in files if path.endswith((".py", ".md", ".yaml")) for line in complaints(path)]
    print("\n".join(found) or "Style: no complaints")
    sys.exit(bool(found))
