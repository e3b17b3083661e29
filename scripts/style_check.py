"""Check docstrings and words in CHECKED, or in the named paths: `python -m scripts.style_check [PATH ...]`."""

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

CHECKED = ["conf", "foredraft", "heads", "inference", "scripts", "tests", "train"]
VERBS = """accept add advance allocate allow answer append apply ask assign attach attend batch bound build cache call cancel
capture carry cast change check choose clear clip clone close collate collect combine commit compare compile compute
concatenate configure connect continue convert convolve copy count create crop cut decide decode delete dequantize describe
detect disable divide do download draft draw drop encode end escape estimate evaluate exclude exit expand expect export extend
extract fetch fill filter find follow forget format free gather generate give group handle hash hold ignore imitate implement
index initialize insert join keep kill learn leave lengthen let limit link list listen load locate lock log make map mark mask
match measure merge move multiply name normalize note open order orthogonalize overwrite pack pad pair parse pass pick plan
predict prefill prepare prepend print process project propose provide push quantize quote raise read rebuild receive record
reduce refine refuse register release reload remember remove rename render reorder repeat replace replay report represent
reset reshape resize resolve restart restore resume retain retry return reuse rotate round run sample save scale score search
select send separate serve set share shift show shrink shuffle signal skip slice sort split spread start step stop store
stream submit sum summarize suppress surround swap switch take test tokenize trace train trim truncate try turn undo unload
unpack update upload use validate verify wait warn watch widen wrap write yield"""
AVOID = (
    r"(?i)\b((?<!there\s)(is|are|holds?|knows?)\s+no(?!\s+longer)|as\s+it\s+is|(as|where)\s+they\s+are|where\s+there\s+(is|are)|of\s+(its|their)\s+own|beside"
    r"|begun|(?<![▁｜])begins?|flatters?|thoughts|whichever|hopeless|so\s+many|decodes?\s+plainly|plain\s+decoding|witness)\b"
)
KINDS = {"COMMENT", "STRING", "FSTRING_MIDDLE"}
NO_PROSE = r"""(?s)r["'].*|["']\w+["']"""  # a pattern, or a name
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
VALUE = r"\{[^{}\n]*\}"  # of an f-string; since Python 3.12 its tokens are separate


def complaints(path: str) -> Iterator[str]:
    """Yield a line for each docstring of a function or class without a leading verb, and for each phrase of AVOID."""
    text = Path(path).read_text(encoding="utf-8")
    prose = [(1, text)]
    if path.endswith(".py"):
        tokens: Iterator = tokenize.generate_tokens(iter(text.splitlines(True)).__next__)
        prose = [(token.start[0], token.string) for token in tokens if tokenize.tok_name[token.type] in KINDS]
        prose = [(line, re.sub(VALUE, "", part)) for line, part in prose if not re.fullmatch(NO_PROSE, part)]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DEFINITION) and (doc := ast.get_docstring(node)):
                first, second = f"{doc} .".split()[:2]  # "Index of ..." starts with a noun
                if first.rstrip(",:") not in VERBS.title().split() or second == "of":
                    yield f"{path}:{node.lineno}: no verb of VERBS starts {doc.splitlines()[0]!r}"
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
