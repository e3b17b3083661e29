"""Train a draft head and prove what it gained:  python train/run.py head=eagle3 target=hf target.path=... data=..."""

from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from transformers import PrinterCallback, set_seed

from heads import hub
from inference.drafters import drafter_for
from inference.evaluate import acceptance
from inference.evaluate import run as decode
from train import data as text
from train import datacard, prove, ship
from train.entry import entry
from train.memory import keep_freed
from train.session import Measure, Progress, StopOnSignal, end_of_training, open_directory, seconds_of
from train.trainer import HeadTrainer


@entry("train")
def main(cfg: DictConfig) -> None:
    set_seed(cfg.seed)
    keep_freed()
    if cfg.push_to_hub is not None:
        hub.check_name(cfg.push_to_hub)  # not after hours of training
    target = instantiate(cfg.target)
    if target.tokenizer is None:
        raise ValueError(f"target.path={cfg.target.path} has no tokenizer, and training reads text: save one beside it")
    data: text.Corpus = instantiate(cfg.data, tokenizer=target.tokenizer)
    prove.check_settings(target, data, cfg.evaluate, cfg.length)
    counts = text.count_tokens(data.train, target.vocab_size)
    more: dict[str, Any] = {"counts": counts} if "draft_vocab_size" in cfg.head else {}
    head = instantiate(cfg.head, target=target, **more)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    # Two checkpoints of weights and two AdamW moments in float32, and the head itself.
    directory, checkpoint = open_directory(cfg, need_bytes=2 * 3 * 4 * parameters + 2 * parameters + 2**20)
    if cfg.written:
        data = text.written_by(target, data, cfg.written, cfg.seed, directory / "written.json")
    if head.pruned:  # by what the target writes, which is what the head will draft
        head.start_projections(target, text.count_tokens(data.train, target.vocab_size))
    packed = text.Packed(data.train, cfg.length, cfg.seed, cfg.long)
    counts = text.count_tokens(data.train, target.vocab_size)
    card = datacard.describe(data.train) | datacard.coverage(counts, head.draft_ids)
    data = data._replace(card=data.card | card | packed.card)
    datacard.save(directory, data.card)
    print(f"{head.kind}: {parameters:,} parameters for {target.name}\n{datacard.summary(data.card)}", flush=True)

    def validate() -> float:
        rows = text.prompts(target.tokenizer, data.validation, cfg.evaluate.eval_prompts, cfg.evaluate.prompt_tokens)
        head.eval()
        length = acceptance(decode(target, drafter_for(head, target), rows, max_new_tokens=64, eos_token_id=-1))
        head.train()
        return length

    dataset = instantiate(cfg.features)(packed, target, head.layers, cfg.trainer.per_device_train_batch_size)
    lesson = instantiate(cfg.lesson, head=head, target=target, loss=instantiate(cfg.loss))
    stop = StopOnSignal()
    trainer = HeadTrainer(
        model=lesson,
        args=instantiate(
            cfg.trainer, use_cpu=target.device.type == "cpu", remove_unused_columns=False, disable_tqdm=True
        ),
        train_dataset=dataset,
        build_optimizer=instantiate(cfg.optimizer),
        callbacks=[stop, Progress(), Measure(cfg.evaluate.eval_steps, validate)],
    )
    trainer.remove_callback(PrinterCallback)
    if checkpoint is not None and (end := end_of_training(checkpoint)) is not None:
        lesson.load_state_dict(load_file(Path(checkpoint) / "model.safetensors"))
        trainer.state = end  # Trainer would go one step too far: it looks where it is only behind a step
    else:
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        finally:
            stop.restore()
    if stop.stopped:
        print(f"stopped at step {trainer.state.global_step}; the same command goes on from there", flush=True)
        raise SystemExit(130)

    prove.save_final(lesson, directory / "head", data, cfg.length)
    metrics, shown = prove.measure(target, directory / "head", data, cfg.evaluate)
    trained = [entry["tokens_per_second"] for entry in trainer.state.log_history if "tokens_per_second" in entry]
    metrics["train_tokens_per_second"] = round(sum(trained) / max(1, len(trained)), 1)
    metrics["train_seconds"] = round(seconds_of(trainer.state), 1)
    metrics |= prove.facts_of_run(head, target)
    config = OmegaConf.to_yaml(cfg, resolve=True)
    (directory / "head" / "config.yaml").write_text(config)
    prove.publish(directory, metrics, head, data, trainer.state.log_history, shown, config)
    if cfg.push_to_hub is not None:
        print(ship.push(directory / "head", target, cfg.push_to_hub, private=cfg.push_private), flush=True)


if __name__ == "__main__":
    main()
