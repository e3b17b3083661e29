"""Writes tests/support/gguf_golden.json again by llama.cpp's converter:

    python -m tests.serving.llamacpp_golden DIRECTORY_OF_LLAMA_CPP

`bash scripts/llamacpp_env.sh` gets it into .venv-llamacpp/llama.cpp.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from foredraft.heads import Target, save_head
from tests.support.gguf_heads import CONVERT, EMBEDDED, GOLDEN, OUTTYPES, SMALL, contents, gguf_head, write_qwen


def main(sources: str) -> None:
    target = Target.from_pretrained(EMBEDDED, dtype="float32", device="cpu")
    golden: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in SMALL:
            save_head(gguf_head(name, target), Path(folder) / name, target)
        write_qwen(Path(folder) / "mtp")
        for name in (*SMALL, "mtp"):
            more = ["--mtp"] if name == "mtp" else ["--target-model-dir", str(EMBEDDED)]
            for outtype in OUTTYPES:
                out = Path(folder) / f"{name}-{outtype}.gguf"
                command = [sys.executable, str(CONVERT), sources, f"{folder}/{name}", *more]
                command += ["--outtype", outtype, "--outfile", str(out)]
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr[-3000:]
                golden[f"{name} {outtype}"] = contents(out)
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
