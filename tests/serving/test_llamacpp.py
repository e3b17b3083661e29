"""Check our GGUF files with llama.cpp's server, which drafts with heads that were trained here.

    bash scripts/llamacpp_env.sh && python -m pytest -m serving tests/serving/test_llamacpp.py

FOREDRAFT_LLAMACPP_ENV names the environment (default .venv-llamacpp). FOREDRAFT_SERVING_HEADS names a folder with trained
heads of the test model, <kind>/head each; without it some are trained here for a few minutes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.heads import Target, load_head, save_head
from foredraft.heads.base import BlockHead, DraftHead
from foredraft.heads.mtp import MTPHead
from foredraft.heads.target_model.resolve_path import gguf_of, resolve_path
from foredraft.inference.drafters import drafter_for
from foredraft.inference.evaluation.measure import run, texts
from tests.serving.conftest import DEPTH, EMBEDDED, NEW_TOKENS, PROMPTS, QUIET, SMOLLM2, call, chat_prompts, train_heads
from tests.support import ROOT
from tests.support.gguf_heads import CONVERT, contents, write_qwen

gguf = pytest.importorskip("gguf")
pytestmark = [pytest.mark.serving, pytest.mark.timeout(7200)]  # its heads are trained first

HERE = Path(__file__).resolve().parent
ENVIRONMENT = Path(os.environ.get("FOREDRAFT_LLAMACPP_ENV", ROOT / ".venv-llamacpp"))
# DFlash-2's loader wants k (k + 1) numbers of a hidden state, which 192 are not at its usual k of 16.
KINDS = {"eagle3": [], "dflash": [], "jetspec": [], "dflash2": ["head.selector_top_k=13"], "dspark": []}


def convert(model: Path, out: Path, *more: str | Path) -> Path:
    """Convert a folder in transformers' format with llama.cpp's own converter."""
    if not out.is_file():
        call(sys.executable, CONVERT, ENVIRONMENT / "llama.cpp", model, "--outfile", out, *more)
    return out


class Out(NamedTuple):
    """Hold the texts of llama.cpp or of our engine, and how many steps accepted at least d drafts, d = 1 .. depth."""

    texts: list[list[int]]
    per_position: list[int]

    @property
    def emitted(self) -> float:
        """Return the acceptance length; a text's first token comes from its prompt."""
        tokens = sum(len(text) - 1 for text in self.texts)
        return tokens / (tokens - sum(self.per_position))


def decode(
    folder: Path,
    target: Path,
    rows: list[list[int]],
    head: Path | None,
    method: str = "eagle3",
    depth: int = DEPTH,
    cache: str = "f32",
) -> Out:
    folder.mkdir(parents=True, exist_ok=True)
    job = {"target": str(target), "head": None if head is None else str(head), "method": method, "depth": depth}
    job |= {
        "prompts": rows,
        "new_tokens": NEW_TOKENS,
        "cache": cache,
        "flash": False,
        "output": str(folder / "out.json"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    call(ENVIRONMENT / "bin" / "python", HERE / "llamacpp.py", folder / "job.json")
    out = json.loads((folder / "out.json").read_text())
    assert sum(out["per_position"]) == out["accepted"]
    print(f"{folder.name}: {out['drafted']} drafts, {out['accepted']} accepted, {out['seconds']:.1f} s")
    return Out(out["texts"], out["per_position"])


def chain(head: DraftHead, target: Target, rows: list[list[int]], depth: int) -> Out:
    """Decode the same with our own engine. Drafts after the end of a text are not counted: llama.cpp does not make them."""
    drafter = drafter_for(head, target, width=1, depth=depth, nodes=depth + 1, min_probability=0)
    out = run(target, drafter, rows, max_new_tokens=NEW_TOKENS, eos_token_id=-1)
    accepted = [count - 1 for generation in out for step in generation.steps for count in step.emitted]
    return Out(texts(out), [sum(count >= d for count in accepted) for d in range(1, depth + 1)])


def drafts(head: DraftHead) -> int:
    """Return all drafts of a block: the slots of a shorter one would see fewer of the others."""
    return head.depth if isinstance(head, BlockHead) else DEPTH


def method(kind: str) -> str:
    return kind if kind in ("eagle3", "dspark") else "dflash"


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    if not (ENVIRONMENT / "llama.cpp").is_dir():
        pytest.fail(f"{ENVIRONMENT} is not there: bash scripts/llamacpp_env.sh makes it")


@pytest.fixture(scope="session")
def heads(tmp_path_factory) -> Path:
    return train_heads(tmp_path_factory.mktemp, 120, KINDS)


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Path:
    """Return a folder for what is converted once."""
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="session")
def exact(files) -> Path:
    return convert(EMBEDDED, files / "target-f32.gguf", "--outtype", "f32")


@pytest.fixture(scope="session")
def plain(files, exact, rows) -> list[list[int]]:
    return decode(files / "plain", exact, rows, None).texts


def export(head: Path, folder: Path, target: Path = EMBEDDED, dtype: str = "float32") -> Path:
    where = (f"checkpoint={head}", "format=gguf", f"dtype={dtype}", f"output_dir={folder / 'export'}")
    call(sys.executable, "scripts/export.py", *where, f"target.path={target}", "target.device=cpu")
    return folder / "export" / "head.gguf"


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_accepts_at_the_places_where_we_do(heads, embedded, exact, rows, plain, tmp_path, kind):
    exported = export(heads / kind / "head", tmp_path)
    head = load_head(exported.parent, embedded)
    theirs = decode(tmp_path / kind, exact, rows, exported, method(kind), drafts(head))
    ours = chain(head, embedded, rows, drafts(head))
    print(f"{kind}: accepted per position {theirs.per_position} in llama.cpp, {ours.per_position} here")
    assert theirs.texts == ours.texts == plain
    assert theirs.per_position == ours.per_position
    assert theirs.per_position[0] > 0.02 * PROMPTS * NEW_TOKENS / theirs.emitted  # nothing was left out without a word


def test_an_mtp_layer_accepts_at_the_places_where_we_do(rows, tmp_path):
    """Use the only architecture whose MTP layers have no experts, with random weights. Its layers are recurrent: if a step
    rejects drafts, llama.cpp decodes the accepted ones again and gains a token more, so a count may differ by one."""
    target = Target.from_pretrained(write_qwen(tmp_path / "qwen"), dtype="float32", device="cpu")
    head, rows = MTPHead.for_target(target).eval(), rows[:8]
    save_head(head, tmp_path / "head", target)
    exported = export(tmp_path / "head", tmp_path, tmp_path / "qwen")
    file = convert(tmp_path / "qwen", tmp_path / "target.gguf", "--outtype", "f32", "--no-mtp")
    theirs, ours = decode(tmp_path / "mtp", file, rows, exported, "mtp"), chain(head, target, rows, DEPTH)
    print(f"mtp: accepted per position {theirs.per_position} in llama.cpp, {ours.per_position} here")
    assert theirs.texts == ours.texts
    assert theirs.emitted == pytest.approx(ours.emitted, rel=0.01)
    assert theirs.per_position[1] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_converters_file_is_ours_to_the_byte(heads, tmp_path, kind):
    """Compare all but the file's name and counts: general.name, size_label and tags, and how far those shift what
    follows."""
    head = heads / kind / "head"
    ours = export(head, tmp_path)
    theirs = convert(head, tmp_path / "theirs.gguf", "--target-model-dir", EMBEDDED, "--outtype", "f32")
    assert contents(ours) == contents(theirs)
    readers = [gguf.GGUFReader(path) for path in (ours, theirs)]
    ends = [path.read_bytes()[reader.data_offset :] for path, reader in zip((ours, theirs), readers, strict=True)]
    assert ends[0] == ends[1]


def quantized(source: Path, out: Path, kind: str) -> Path:
    """Return a GGUF file whose matrices are in another number format."""
    reader, number = gguf.GGUFReader(source), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, field.contents(), field.types[0], *field.types[1:2])
    for tensor in reader.tensors:
        matrix = len(tensor.shape) > 1
        data = gguf.quants.quantize(np.array(tensor.data), number) if matrix else np.array(tensor.data)
        writer.add_tensor(tensor.name, data, raw_dtype=number if matrix else gguf.GGMLQuantizationType.F32)
    for finish in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        finish()
    return out


def dequantized(source: Path, folder: Path, kind: str) -> Path:
    """Return a target in transformers' format with the numbers of such a file. Blocks lie in rows, whose order does not
    matter."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "self_generated"))
    number, weights = gguf.GGMLQuantizationType[kind], load_file(source / "model.safetensors")
    for name, tensor in weights.items():
        data = tensor.float().numpy()
        if tensor.dim() > 1:
            data = gguf.quants.dequantize(gguf.quants.quantize(data, number), number)
        weights[name] = torch.from_numpy(np.array(data, dtype=np.float32))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("number", ["Q8_0", "Q4_0", "Q4_1"])
def test_a_quantised_target_accepts_what_its_dequantised_weights_do(heads, exact, rows, tmp_path, number):
    """Expect small differences: llama.cpp also rounds the inputs of products, and keeps keys and values in half precision
    by default."""
    file = quantized(exact, tmp_path / "target.gguf", number)
    target = Target.from_pretrained(dequantized(EMBEDDED, tmp_path / "target", number), dtype="float32", device="cpu")
    head = load_head(heads / "eagle3" / "head", Target.from_pretrained(EMBEDDED, dtype="float32", device="cpu"))
    theirs = decode(tmp_path / number, file, rows, export(heads / "eagle3" / "head", tmp_path), cache="f16")
    ours = chain(head, target, rows, DEPTH)
    print(f"{number}: {theirs.emitted:.3f} tokens per forward in llama.cpp, {ours.emitted:.3f} here")
    assert theirs.emitted == pytest.approx(ours.emitted, rel=0.03)


def test_parity_compares_with_the_server(heads, exact, tmp_path):
    packages = next(ENVIRONMENT.glob("lib/python*/site-packages"))
    given = ("scripts/parity.py", f"target.path={EMBEDDED}", "target.dtype=float32", f"target_gguf={exact}")
    done = subprocess.run(
        [sys.executable, *given, f"checkpoint={heads / 'eagle3' / 'head'}"],
        cwd=ROOT,
        env=os.environ | QUIET | {"PYTHONPATH": f"{ROOT}:{packages}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "every text and number of accepted drafts equal" in done.stdout


@pytest.mark.parametrize("weights", ["f32", "Q4_1"])
def test_smollm2_accepts_at_the_places_where_we_do(files, tmp_path, weights):
    """Use a chat model of 135M parameters and the head in the repository: its dequantized weights in float32, and the file
    that users have."""
    target = Target.from_pretrained(SMOLLM2, dtype="float32", device="cpu")
    folder, head = Path(resolve_path(SMOLLM2, "float32")), ROOT / "scripts" / "smollm2" / "eagle3"
    rows = chat_prompts(target)
    file = gguf_of(SMOLLM2, None, None) if weights == "Q4_1" else None
    file = file or convert(folder, files / "smollm2-f32.gguf", "--outtype", "f32")
    exported = export(head, tmp_path, folder)
    plain, theirs = decode(tmp_path / "plain", file, rows, None), decode(tmp_path / "drafted", file, rows, exported)
    ours = chain(load_head(head, target, dtype=torch.float32), target, rows, DEPTH)
    assert len(rows) >= 4
    same = [a == b == c for a, b, c in zip(theirs.texts, ours.texts, plain.texts, strict=True)]
    print(f"{weights}: accepted per position {theirs.per_position} in llama.cpp, {ours.per_position} here")
    print(f"{sum(same)} of {len(rows)} texts are the same in llama.cpp, drafted and plain, and here")
    print(f"{theirs.emitted:.3f} tokens per forward in llama.cpp, {ours.emitted:.3f} here")
    if all(same):
        assert theirs.per_position == ours.per_position
    if weights == "Q4_1":  # its products round differently, so it writes other texts, which may be easier to draft
        assert theirs.emitted >= 0.97 * ours.emitted
    else:
        assert sum(same) >= 0.9 * len(rows)  # two engines may part at a near-tie
        assert theirs.emitted == pytest.approx(ours.emitted, rel=0.03)
