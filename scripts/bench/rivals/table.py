"""Ours beside other engines, on the same target, head, prompts, dtype and threads, in one table:

    bash scripts/vllm_env.sh && bash scripts/bench/rivals/eagle_env.sh
    python scripts/bench/rivals/table.py head_path=outputs/eagle3/head vllm=.venv-vllm
    python scripts/bench/rivals/table.py head_path=outputs/eagle3/head eagle=.venv-eagle eagle_head=outputs/eagle/head

One client, greedy, prompts one at a time. Transformers is timed in this process, in turn with ours; other engines each in a
process and an environment of their own, with the head as `foredraft export` writes it for them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.heads import Target
from foredraft.heads.target.device import device_name
from foredraft.inference import load_drafter
from foredraft.inference.drafters import chain_of, tree_of
from foredraft.inference.evaluation.benchmark import rivals
from foredraft.inference.evaluation.measure import per_depth
from foredraft.inference.evaluation.speed import Decoder, foredraft_decoder, time_decoders, transformers_decoder
from foredraft.inference.generation import tokens_per_forward
from foredraft.train.cli import CONF, entry
from foredraft.train.data.corpus import prompts

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]


class Task(NamedTuple):
    """What every engine gets."""

    cfg: DictConfig
    target: Target
    rows: list[list[int]]  # prompts
    texts: list[list[int]]  # what plain decoding makes of them
    output: Path


@entry("rivals")
def main(cfg: DictConfig) -> None:
    if cfg.eagle is not None and cfg.eagle_head is None:
        raise ValueError(f"eagle={cfg.eagle} reads an EAGLE-1 head: give eagle_head=DIRECTORY")
    output = Path(cfg.output_dir).resolve()
    output.mkdir(parents=True, exist_ok=True)
    target: Target = instantiate(cfg.target)
    held_out = instantiate(cfg.data, tokenizer=target.text_tokenizer).test
    rows = prompts(target.text_tokenizer, held_out, cfg.prompts, cfg.prompt_tokens)
    found, texts = in_this_process(cfg, target, rows)
    task = Task(cfg, target, rows, texts, output)
    if cfg.vllm is not None:
        found |= in_vllm(task)
    if cfg.eagle is not None:
        found |= in_eagle(task)
    note = f"{len(rows)} prompts, {cfg.new_tokens} new tokens each, one client; {target.name}, {target.dtype}; "
    note += device_name(target.device)
    lines = [
        "| engine | tokens/s | over our plain decoding | tokens per forward | accepted per depth | text |",
        "|---" * 6 + "|",
    ]
    for name, row in found.items():
        shares = " ".join(f"{share:.2f}" for share in row.get("accepted_per_depth", []))
        tau = f"{row['acceptance_length']:.2f}" if "acceptance_length" in row else ""
        over = row["tokens_per_second"] / found["plain"]["tokens_per_second"]
        lines.append(
            f"| {name} | {row['tokens_per_second']:.1f} | {over:.2f} | {tau} | {shares} | {row.get('text', '')} |"
        )
    (output / "rivals.md").write_text("\n".join([*lines, "", note, ""]))
    (output / "rivals.json").write_text(json.dumps({"rows": found, "about": note}, indent=1) + "\n")
    print("\n".join([*lines, "", note]))


def in_this_process(cfg: DictConfig, target: Target, rows: list[list[int]]) -> tuple[dict[str, Row], list[list[int]]]:
    """Ours and transformers', and the texts of plain decoding."""
    drafter = load_drafter(cfg.head_path, target)
    tree = tree_of(drafter)
    assert tree is not None
    ours = {"plain": None, "tree, auto": drafter, "tree, fixed": load_drafter(cfg.head_path, target, tree="fixed")}
    ours[f"chain of {cfg.chain}"] = chain_of(tree, target, cfg.chain)
    if cfg.eagle is not None:
        ours["EAGLE-1, tree, fixed"] = load_drafter(cfg.eagle_head, target, tree="fixed")
    decoders: dict[str, Decoder] = {name: foredraft_decoder(target, one, cfg.new_tokens) for name, one in ours.items()}
    for one in rivals(target, {}):
        assert isinstance(one.drafter, dict)
        decoders[one.name] = transformers_decoder(target, one.drafter, cfg.new_tokens)
    timings = time_decoders(decoders, rows, target)
    texts = [out.new_tokens[0] for out in timings["plain"].generations]
    found: dict[str, Row] = {}
    for name, timing in timings.items():
        found[name] = {"tokens_per_second": timing.rate()}
        if timing.generations:
            same = sum(out.new_tokens[0] == text for out, text in zip(timing.generations, texts, strict=True))
            found[name] |= {
                "acceptance_length": tokens_per_forward(timing.generations),
                "text": f"{same} of {len(texts)} identical",
            }
            if name.startswith("chain"):
                found[name]["accepted_per_depth"] = per_depth(timing.generations, cfg.chain)
    return found, texts


def in_vllm(task: Task) -> dict[str, Row]:
    cfg = task.cfg
    exported = export(cfg.head_path, "vllm", task.target, task.output / "exported")
    speculative = {"method": "eagle3", "model": str(exported), "num_speculative_tokens": cfg.chain}
    found: dict[str, Row] = {}
    for name, how in (("vLLM", None), (f"vLLM, chain of {cfg.chain}", speculative)):
        job = {
            "speculative": how,
            "max_model_len": max(map(len, task.rows)) + cfg.new_tokens + 2 * cfg.chain,
            "max_num_seqs": 1,
            "cache_bytes": 1 << 28,
            "eager": cfg.eager,
        }
        file = f"{name.replace(', ', '_').replace(' ', '_')}.json"
        out, found[name] = run(task, cfg.vllm, "vllm_run.py", job, file)
        if how is not None:
            drafts = out["counted"]["drafts"][0]
            shares = [count / drafts for count in out["counted"]["accepted_tokens_per_pos"]]
            found[name] |= {"acceptance_length": 1 + sum(shares), "accepted_per_depth": shares}
    return found


def in_eagle(task: Task) -> dict[str, Row]:
    exported = export(task.cfg.eagle_head, "eagle", task.target, task.output / "exported_eagle")
    job = {"head": str(exported), "max_model_len": task.target.context}
    out, row = run(task, task.cfg.eagle, "eagle_run.py", job, "eagle.json")
    return {"EAGLE's own code, EAGLE-1": row | {"acceptance_length": out["acceptance_length"]}}


def export(head: str, format: str, target: Target, directory: Path) -> Path:
    """The head as `foredraft export` writes it, if that was not done before."""
    if not directory.exists():
        given = [f"head={head}", f"format={format}", f"output_dir={directory}", f"target.path='{target.name}'"]
        subprocess.run([sys.executable, str(CONF.parent / "scripts" / "export.py"), *given], check=True)
    return directory


def run(task: Task, environment: str, script: str, job: dict[str, Any], name: str) -> tuple[dict[str, Any], Row]:
    """What the script says, which gets the job in a file, and its row of the table."""
    cfg, target, file = task.cfg, task.target, task.output / name
    common = {
        "target": str(Path(target.name).resolve()) if Path(target.name).exists() else target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": task.rows,
        "new_tokens": cfg.new_tokens,
        "output": str(file),
    }
    asked = file.with_suffix(".job.json")
    asked.write_text(json.dumps(common | job))
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    python = Path(environment) / "bin" / "python"
    log = file.with_suffix(".log")
    with log.open("w") as opened:
        done = subprocess.run(
            [str(python), str(HERE / script), str(asked)],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | threads,
            stdout=opened,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        raise ValueError(f"{script} ended with exit code {done.returncode}; what it said is in {log}")
    out = json.loads(file.read_text())
    same = sum(one[: cfg.new_tokens] == text for one, text in zip(out["texts"], task.texts, strict=True))
    rate = sum(map(len, out["texts"])) / sum(out["seconds"])
    return out, {"tokens_per_second": rate, "text": f"{same} of {len(task.texts)} identical"}


if __name__ == "__main__":
    main()
