"""Choose the number of drafts per step for your traffic:  foredraft tune target=ORG/NAME drafter=outputs/mine/head

Measures how often each depth of the head's drafts is accepted on your prompts, and how long a step takes here for several
numbers of requests and drafts. Prints the speed of each, and the settings for vLLM (with its table by number of requests),
SGLang and llama.cpp, which draft chains. Run it where you will serve: on another machine a step takes another time.
"""

import json
import shlex
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.cli import check_at_least, entry
from foredraft.heads import Target, load_head
from foredraft.heads.base import DraftHead, ParallelHead
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.formats.engines import SGLANG_TREE, engines, fill
from foredraft.heads.hub import find
from foredraft.heads.target_model.packing import pack
from foredraft.inference.drafters import HeadTree, Likeliest, chain_of, drafter_for
from foredraft.inference.evaluation.measure import run
from foredraft.inference.evaluation.tuning import Tuning, reached_depths, seconds_by_drafts
from foredraft.scripts.evaluate import find_prompts
from foredraft.train.data import prompt_sets
from foredraft.train.runtime.environment import facts_of_measurement

VLLM, VLLM_KEY = "vLLM", "num_speculative_tokens"


@entry("tune")
def main(cfg: DictConfig) -> None:
    for name in ("requests", "drafts"):
        if not cfg[name] or min(cfg[name]) < 1 or sorted({*cfg[name]}) != list(cfg[name]):
            raise ValueError(f"{name}={list(cfg[name])}: give ascending numbers from 1 on")
    check_at_least(cfg, 1, "steps", "prompt_tokens", "max_new_tokens")
    check_at_least(cfg, 0, "limit", "temperature")
    prompt_sets.check_name(cfg.prompts)
    Path(cfg.output).parent.mkdir(parents=True, exist_ok=True)  # before anything is measured
    path = cfg.drafter.path  # where it is missing, that is said before the target is loaded
    target: Target = instantiate(cfg.target)
    head = load_head(path, target)
    prompts = [prompt.tokens for prompt in find_prompts(cfg, target)]
    pack(head)
    tree = drafter_for(head, target)
    assert isinstance(tree, HeadTree), "a fixed tree"
    most = head.limit or (head.depth if isinstance(head, ParallelHead) else max(cfg.drafts))
    lengths = [length for length in cfg.drafts if length <= most]
    if not lengths:
        raise ValueError(f"drafts={list(cfg.drafts)}: the head drafts {most} tokens at most")
    longest = Likeliest(chain_of(tree, target, lengths[-1]))
    texts = run(target, longest, prompts, cfg.max_new_tokens, "measuring acceptance", temperature=cfg.temperature)
    if not any(text.steps for text in texts):
        raise ValueError(
            f"every answer ends with its first token, which no draft precedes: raise max_new_tokens={cfg.max_new_tokens}, "
            "or give other prompts"
        )
    tuning = Tuning(reached_depths(texts, lengths[-1]), {})
    for requests in cfg.requests:
        given = prompts, requests, cfg.steps, cfg.temperature
        tuning.seconds[requests] = seconds_by_drafts(target, tree, lengths, *given)
        print(row(tuning, requests), flush=True)
    print(f"accepted at depths 1 to {lengths[-1]}: {' '.join(f'{share:.2f}' for share in tuning.reached)}")
    schedule = tuning.schedule()
    first, last, drafts = next((span for span in schedule if span[2]), schedule[0])
    commands = settings(schedule, drafts, path, head, target)
    for engine, command in commands.items():
        which = "" if engine == VLLM else f", {drafts} drafts, which is best for {first} to {last} requests"
        print(f"\n{engine}{which}:\n{command}")
    if commands and (note := shorter_blocks(head, drafts)):
        print(f"\n{note}")
    if not drafts:
        print(
            "\nno number of drafts is faster here than decoding without: train the head for longer, or serve without it"
        )
    found = {"schedule": schedule, "accepted": tuning.reached, "seconds": tuning.seconds, "commands": commands}
    about = facts_of_measurement(target) | {"head": path, "prompts": cfg.prompts, "n": len(prompts)}
    Path(cfg.output).write_text(json.dumps(found | {"about": about}, indent=1, default=str) + "\n")
    print(f"\nwritten: {cfg.output}")


def row(tuning: Tuning, requests: int) -> str:
    """Describe the speeds of one number of requests."""
    best = tuning.best(requests)
    speeds = (
        f"{drafts} drafts {tuning.speedup(requests, drafts):.2f}x" for drafts in tuning.seconds[requests] if drafts
    )
    return f"{requests} requests: {', '.join(speeds)}; best {best or 'without'}"


def shorter_blocks(head: DraftHead, drafts: int) -> str:
    """Return how engines draft fewer tokens than a block has with this head, if not by leaving out the last ones as here."""
    if not isinstance(head, DFlashHead) or head.causal or drafts == head.depth:
        return ""
    size = drafts + (not head.sample_from_anchor)
    return (
        f"vLLM and llama.cpp shorten the block to {size} positions, which see each other: their drafts differ from those of "
        f"whole blocks, which were measured here, unless the head is trained with head.block_size={size}."
    )


def settings(schedule: list[list[int]], drafts: int, path: str, head: DraftHead, target: Target) -> dict[str, str]:
    """Return the command of each engine that loads the head from `path` and lets a user choose the number of drafts; none if
    no drafts pay off. vLLM gets the schedule, others `drafts` for any number of requests."""
    most, found = max(drafts for _, _, drafts in schedule), dict[str, str]()
    if not drafts:
        return found
    # Engines do not look for the head in the directory of a run.
    path = str(find(path)) if Path(path).expanduser().is_dir() else path
    both = (engines(head, target, target.checkpoint, count) for count in (drafts, drafts + 1))
    for one, other in zip(*both, strict=True):
        engine, command = one["engine"], one["command"]
        if command == other["command"]:  # it drafts whole blocks
            continue
        if one["format"] is None:
            command = fill(command, head=path)
        else:
            folder = f"exported-{one['format']}"
            command = fill(command, head=folder)
            given = shlex.join([f"checkpoint={path}", f"format={one['format']}", f"output_dir={folder}"])
            command = f"foredraft export {given}\n{command}"
        table = f'"{VLLM_KEY}": {most}, "{VLLM_KEY}_per_batch_size": {json.dumps(schedule)}'
        command = command.replace(f'"{VLLM_KEY}": {drafts}', table)
        chain = f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {drafts + 1}"
        found[engine] = command.replace(SGLANG_TREE, chain)
    return found


if __name__ == "__main__":
    main()
