"""Measure drafters:  foredraft evaluate target=ORG/NAME 'drafter=[outputs/mine/head,ngram]' prompts=spec_bench

Every drafter, autoregressive decoding (the baseline) and transformers' own generate decode the same prompts, all in turn on
each prompt. The report has acceptance length, speed relative to the baseline, identity with the baseline's texts, the time of
each stage of a step, and faults of drafters. The same command resumes an interrupted run.
"""

import contextlib
import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from foredraft.cli import check_at_least, entry
from foredraft.heads import Target, load_head
from foredraft.heads.caches.device import device_name
from foredraft.heads.checkpoint import fingerprint
from foredraft.heads.hub import find, weights_sha256
from foredraft.inference import generate, load_drafter
from foredraft.inference.drafters import AutoTree, Drafter, Likeliest, chain_of, fixed_form, tree_of
from foredraft.inference.evaluation.benchmark import BASELINE, Benchmark, Lines, Prompt, System, rivals
from foredraft.inference.evaluation.report import Report, terminal, write_report
from foredraft.inference.evaluation.results import measure, samples
from foredraft.train.data import long_prompts, prompt_sets
from foredraft.train.data.corpus import count_tokens
from foredraft.train.data.loading import load_corpus
from foredraft.train.runtime.environment import facts_of_measurement
from foredraft.train.runtime.locks import hold, write_atomically


@entry("evaluate")
def main(cfg: DictConfig) -> None:
    check_at_least(cfg, 1, "prompt_tokens", "max_new_tokens", "repeats", "chain", "lengths")
    check_at_least(cfg, 0, "limit", "temperature")
    if not cfg.temperature:
        raise ValueError("temperature=[]: give at least one, such as 0 (greedy)")
    if cfg.lengths and cfg.prompts not in ("held_out", "long"):
        raise ValueError(f"lengths={list(cfg.lengths)} is for prompts=held_out and prompts=long, not {cfg.prompts}")
    prompt_sets.check_name(cfg.prompts, cfg.lengths)
    output = Path(cfg.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with hold(output, "output_dir"):
        evaluate(cfg, output)


def evaluate(cfg: DictConfig, output: Path) -> None:
    if not isinstance(cfg.drafter, ListConfig):
        cfg.drafter = [cfg.drafter]
    if not cfg.drafter or not all(isinstance(given, str | DictConfig) for given in cfg.drafter):
        raise ValueError(
            f"drafter={cfg.drafter}: give names, directories, or groups of keys such as {{path: DIRECTORY}}"
        )
    audited = head_paths(cfg) if cfg.audit else []
    if cfg.audit and not audited:
        raise ValueError(
            f"audit=true is for trained heads, and drafter={list(cfg.drafter)} names none: give a head's directory"
        )
    target: Target = instantiate(cfg.target)
    check_same_run(output / "settings.json", cfg, target)
    prompts = read_prompts(cfg, target, output / "prompts.json")
    about = prompt_sets.summary(prompts)
    print(about, flush=True)
    lines = Lines(output / "lines.jsonl")
    systems = [*load(cfg, target, lines), *(rivals(target, assistants(cfg)) if cfg.rivals else ())]
    benchmark = Benchmark(target, systems, prompts, cfg.max_new_tokens, lines)
    metadata = {**facts_of_measurement(target), "prompts": about}
    results = measure(benchmark, [float(t) for t in cfg.temperature], cfg.repeats, metadata)
    page = Report(f"Drafters for {target.name}", results.metadata, results, list(samples(benchmark)))
    write_report(output, page)
    print(f"\n{terminal(results)}\n\nreport: {output / 'report.html'}")
    if audited:
        audit_heads(cfg, target, audited, [prompt.tokens for prompt in prompts])


def audit_heads(cfg: DictConfig, target: Target, heads: list[tuple[str, str | None]], prompts: list[list[int]]) -> None:
    """Print where the first guesses of each head are right."""
    from foredraft.train.audit import audit, table, texts_of  # needs the extra `train`

    data = load_corpus(cfg.data, target)
    texts, counts = texts_of(target, data, prompts, cfg.max_new_tokens), count_tokens(data.train, target.vocab_size)
    for path, revision in heads:
        head = load_head(path, target, torch.float32, revision)
        print(f"\n{path}\n{table(audit(head, target, texts, counts))}")


def parts_of(cfg: DictConfig) -> list[tuple[str, str | None]]:
    """Return the drafters, and each of those that a + joins, as `load_drafter` reads it, each with its revision."""
    options = [DictConfig({"path": given}) if isinstance(given, str) else given for given in cfg.drafter]
    paths = [(str(given.get("path", "")), given.get("revision")) for given in options]
    joined = [([path] if Path(path).is_dir() else path.split("+"), at) for path, at in paths]
    return [(part, None if len(parts) > 1 and Path(part).is_dir() else at) for parts, at in joined for part in parts]


def head_paths(cfg: DictConfig) -> list[tuple[str, str | None]]:
    """Return the directories or repositories of the heads among the drafters, each with its revision."""
    parts = dict.fromkeys(parts_of(cfg))  # one may stand alone and in a +
    return [(part, at) for part, at in parts if ":" not in part and ("/" in part or Path(part).is_dir())]


def check_same_run(file: Path, cfg: DictConfig, target: Target) -> None:
    """Save the settings and digests of the weights. Raises ValueError if the directory contains texts of a run with others;
    repeats may differ. Prompts of a run that failed before its first text are removed."""
    settings = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(settings, dict)
    for name in ("repeats", "temperature", "rivals", "audit", "output_dir"):
        del settings[name]
    settings["weights"] = {"target": fingerprint(target)}
    for path, revision in [*head_paths(cfg), *((path, None) for path in assistants(cfg).values())]:
        with contextlib.suppress(ValueError):  # a drafter that cannot be loaded is omitted later
            name = path if revision is None else f"{path}@{revision}"
            settings["weights"][name] = weights_sha256(find(path, revision))
    settings["hardware"] = device_name(target.device)  # speeds of two machines have no common mean
    before = json.loads(file.read_text()) if file.exists() else {}
    if different := [name for name in before if before[name] != settings.get(name)]:
        if Lines(file.parent / "lines.jsonl").of("text"):
            raise ValueError(
                f"output_dir={file.parent} contains a run with other settings, weights or hardware ({', '.join(different)}: "
                f"{file}). Use another output_dir, or remove it."
            )
        (file.parent / "prompts.json").unlink(missing_ok=True)
    write_atomically(file, json.dumps(settings, indent=1) + "\n")


def read_prompts(cfg: DictConfig, target: Target, file: Path) -> list[Prompt]:
    """Return the prompts that an earlier part of the run saved, or read and save new ones. Questions of several turns need
    the target's answers to the turns before."""
    if file.exists():
        return [Prompt(*prompt) for prompt in json.loads(file.read_text())]
    prompts = find_prompts(cfg, target, cfg.lengths)
    write_atomically(file, json.dumps(prompts) + "\n")
    return prompts


def find_prompts(cfg: DictConfig, target: Target, lengths: Sequence[int] = ()) -> list[Prompt]:
    """Return the prompts that cfg.prompts names. lengths: as in conf/evaluate.yaml."""
    tokenizer = target.text_tokenizer
    most = (target.context or 10**9) - cfg.max_new_tokens
    if most < max([1, *lengths]):
        raise ValueError(
            f"max_new_tokens={cfg.max_new_tokens} leaves {most} tokens for a prompt, of the target's context of "
            f"{target.context}"
        )
    if cfg.prompts in ("held_out", "long"):
        data, count = load_corpus(cfg.data, target), cfg.limit or 10**6
        if lengths:
            make = long_prompts.asked if cfg.prompts == "long" else long_prompts.continued
            return make(tokenizer, long_prompts.texts_of(tokenizer, data, count, lengths), lengths)
        found = prompt_sets.held_out(tokenizer, data, count, cfg.prompt_tokens)
        return [Prompt.of(prompt.category, prompt.tokens, prompt.ends, most) for prompt in found]

    def answer(ids: list[int]) -> list[int]:
        input_ids = torch.tensor([ids], device=target.device)
        return generate(target, None, input_ids, max_new_tokens=cfg.max_new_tokens).new_tokens[0]

    questions = prompt_sets.questions(cfg.prompts, cfg.limit or None)
    how = {name: cfg.data[name] for name in ("template", "thinking") if name in cfg.data}
    return list(prompt_sets.tokenize(questions, tokenizer, most, answer, **how))


def load(cfg: DictConfig, target: Target, lines: Lines) -> list[System]:
    """Return the baseline and the drafters, each with its variants. Drafters that cannot be loaded are logged."""
    systems = [System(BASELINE, None)]
    for given in cfg.drafter:
        options: dict[str, Any] = {"path": given} if isinstance(given, str) else {str(key): given[key] for key in given}
        name = str(options.pop("name", options.get("path", options.get("_target_"))))
        try:
            drafter = (
                instantiate(options, target=target) if "_target_" in options else load_drafter(target=target, **options)
            )
            systems += with_variants(name, drafter, target, cfg.chain)
        except Exception as error:
            lines.failed(name, error)
    if len(systems) == 1:
        raise ValueError(
            f"no drafter of drafter={list(cfg.drafter)} could be loaded: {lines.of('error')[-1]['reason']}"
        )
    return systems


def with_variants(name: str, drafter: Drafter, target: Target, length: int) -> Iterator[System]:
    """Yield the drafter, its fixed tree or chain if it chooses the size, and a head's chain of this length."""
    tree, chain = tree_of(drafter), f"{name}, chain of {length}"
    yield System(name, drafter, chain=chain)
    if tree is not None:
        if isinstance(drafter, AutoTree):
            yield System(f"{name}, {fixed_form(tree)}", copy.copy(tree), chain=chain)
        yield System(chain, Likeliest(chain_of(tree, target, length)), once=True)


def assistants(cfg: DictConfig) -> dict[str, str]:
    """Return the smaller models among the drafters, with which transformers can draft too."""
    return {part: part.removeprefix("draft:") for part, _ in parts_of(cfg) if part.startswith("draft:")}


if __name__ == "__main__":
    main()
