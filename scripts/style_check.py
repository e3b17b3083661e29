"""Check docstrings and words in CHECKED, or in the named paths: `python -m scripts.style_check [PATH ...]`."""

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

CHECKED = ["conf", "foredraft", "heads", "inference", "scripts", "tests", "train"]
VERBS = """accept add adjust advance align allocate allow answer append apply ask assign attach attend batch bind bound
build cache call cancel capture carry cast catch change check choose clear clip clone close collate collect combine
commit compare compile compute concatenate configure confine connect continue convert convolve copy correct count create
crop cut decide declare decode define delegate delete dequantize derive describe detect determine disable discard divide
do download draft draw drive drop enable encode end ensure enter escape estimate evaluate exclude exit expand expect
export expose extend extract fetch fill filter find finish fit fix flatten follow force forget format free fuse gather
generate get give group handle hash hold ignore imitate implement index initialize insert install iterate join keep kill
learn leave lengthen let limit link list listen load locate lock log make map mark mask match measure merge mix move
multiply name normalize note number open order orthogonalize override overwrite pack pad pair parse pass patch pick pin
plan precompute predict prefill prepare prepend print process project propose provide publish push put quantize quote
raise reach read rebuild receive recognize reconstruct record reduce refine refuse register reject release reload
remember remove rename render reorder repeat replace replay report represent require reset reshape resize resolve
restart restore restrict resume retain retry return reuse rotate round route run sample save scale scan score search
seed select send separate serve set shard share shift show shrink shuffle signal skip slice sort split spread start step
stop store stream strip submit sum summarize suppress surround swap switch synchronize take test tie tokenize trace
train transfer translate trim truncate try turn undo unload unpack update upload use validate verify wait walk warn
watch widen wrap write yield"""
AVOID = (
    r"(?i)\b((?<!there\s)(is|are|holds?|knows?)\s+no(?!\s+longer)|as\s+it\s+is|(as|where)\s+they\s+are|where\s+there\s+(is|are)|of\s+(its|their)\s+own|beside"
    r"|begun|(?<![▁｜])begins?|flatters?|thoughts|whichever|hopeless|so\s+many|decodes?\s+plainly|plain\s+decoding|witness)\b"
)
KINDS = {"COMMENT", "STRING", "FSTRING_MIDDLE"}
NO_PROSE = r"""(?s)r["'].*|["']\w+["']"""  # a pattern, or a name
VALUE = r"\{[^{}\n]*\}"  # of an f-string; since Python 3.12 its tokens are separate
CODE = r"`[^`\n]+`"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def complaints(path: str) -> Iterator[str]:
    """Yield a line for each docstring of a function or class without a leading verb, and for each phrase of AVOID."""
    text = Path(path).read_text(encoding="utf-8")
    prose = [(1, text)]
    if path.endswith(".py"):
        tokens: Iterator = tokenize.generate_tokens(iter(text.splitlines(True)).__next__)
        tokens = (token for token in tokens if tokenize.tok_name[token.type] in KINDS)
        prose = [(token.start[0], token.string) for token in tokens if not re.fullmatch(NO_PROSE, token.string)]
        prose = [(line, re.sub(VALUE, "", part) if part[:1] == "f" else part) for line, part in prose]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DEFINITIONS) and (doc := ast.get_docstring(node)):
                first, second = f"{doc} .".split()[:2]  # "Index of ..." starts with a noun
                if first.rstrip(",:") not in VERBS.title().split() or second == "of":
                    yield f"{path}:{node.lineno}: no verb of VERBS starts {doc.splitlines()[0]!r}"
    for line, part in prose:
        part = re.sub(CODE, "``", part)
        for hit in re.finditer(AVOID, part):
            yield f"{path}:{line + part.count(chr(10), 0, hit.start())}: {hit[0]!r} is to be avoided"


if __name__ == "__main__":
    command = ["git", "ls-files", *(sys.argv[1:] or CHECKED)]
    files = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    found = [line for path in files if path.endswith((".py", ".md", ".yaml")) for line in complaints(path)]
    print("\n".join(found) or "Style: no complaints")
    sys.exit(bool(found))
