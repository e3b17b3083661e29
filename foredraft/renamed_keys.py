"""The keys and choices of earlier versions. A command line that has one ends with a sentence that names the new spelling."""

from collections.abc import Collection

# "KEY=VALUE" is a choice or a value, "KEY" a key with all keys below it. An entry applies where the old spelling is unknown
# and the new one is known, so that a key can keep a name in one program that it lost in another. Several new spellings:
# the first known one.
RENAMED: dict[str, str | tuple[str, ...]] = {
    # groups and choices of training
    "target=embedded": "target=test_model",
    "target=hf": "target=ORG/NAME",
    "target=shape": "target=FILE.json",
    "data=hub": "data=conversations",
    "data=jsonl": "data=conversations",
    "data=parquet": "data=conversations",
    "experiment": "recipe",
    "recipe=embedded": "preset=test_model",
    "recipe=embedded_log": "preset=test_model_log",
    "recipe=hf": "preset=gpu",
    "recipe=hours": "preset=cpu",
    "recipe=shape": "preset=gpu",
    "features=online": "hidden_states=online",
    "features=disk": "hidden_states=offline",
    "features=server": "hidden_states=server",
    "loss=soft": "loss=kl_div",
    "loss=hard": "loss=ce",
    "loss=lk": "loss=nla",
    "loss=adaptive_lk": "loss=lk_hybrid",
    "loss=total_variation": "loss=tv",
    "loss=reverse_kl": "loss=rkl",
    "hidden_states.dtype=bf16": "hidden_states.dtype=bfloat16",
    "hidden_states.dtype=fp8": "hidden_states.dtype=float8",
    # keys of training
    "criterion": "objective",
    "data.max_rows": "data.max_samples",
    "data.test_path": "data.val_path",
    "data.test_share": "data.val_split",
    "evaluate": "eval",
    "evaluate.eval_prompts": "eval.num_prompts",
    "evaluate.eval_steps": "eval.steps",
    "evaluate.new_tokens": "eval.max_new_tokens",
    "evaluate.proof": "eval.check_float32",
    "evaluate.prompts": "eval.final_num_prompts",
    "features": "hidden_states",
    "features.also_layers": "hidden_states.extra_layer_ids",
    "features.whole_target": "hidden_states.load_full_target",
    "head.depth": ("head.ttt_steps", "head.num_heads", "head.num_depths"),
    "head.layers": "head.target_layer_ids",
    "head.lora_rank": "head.lora_r",
    "head.num_layers": "head.num_hidden_layers",
    "head.rank": "head.lora_r",
    "length": "max_length",
    "long": "packing",
    "lora": "lora_r",
    "loss.eta": "loss_args",
    "loss.k": "loss_args",
    "loss.soft_weight": "loss_args",
    "loss.temperature": "loss_args",
    "loss.top_k_weight": "loss_args",
    "loss.weights": "loss_args",
    "optimizer": "trainer.optim",
    "optimizer.matrix_lr": "trainer.learning_rate",
    "trainer.muon_lr": "trainer.learning_rate",
    "strategy.arguments": "strategy_args",
    "strategy.name": "strategy",
    # keys of plan
    "accumulation": "trainer.gradient_accumulation_steps",
    "bf16": "trainer.bf16",
    "rows": "trainer.per_device_train_batch_size",
    # keys of serving
    "max_rows": "max_num_seqs",
    "batch": "batch_size",
    "drafter.spec": "drafter.path",
    "drafter=draft_model": "drafter=draft:ORG/NAME",
    "drafter=head": "drafter=ORG/NAME",
    "drafter=several": "drafter=A+B",
    "drafter=union": "drafter=A+B",
    "drafters": "drafter",
    "colour": "color",
    "dtype=bf16": "dtype=bfloat16",
    "dtype=f16": "dtype=float16",
    "dtype=f32": "dtype=float32",
    "folder": "output_dir",
    "format.dtype": "dtype",
    "format.target_gguf": "target_gguf",
    "head": "checkpoint",
    "head_path": "drafter",
    "heads": "drafter",
    "learn.budget": "learn.max_minutes",
    "learn.directory": "learn.output_dir",
    "learn.rows": "learn.num_samples",
    "learn.share": "learn.device_share",
    "max_tokens": "max_new_tokens",
    "model": "served_model_name",
    "new_tokens": "max_new_tokens",
    "prefill_chunk": "max_num_batched_tokens",
    "prefix_cache_gib": "cache_gib",
    "prompts": "num_prompts",
}

OF_MEDUSA2 = "it was a setting of head=medusa2, which was removed"
PUSH = "foredraft push sends a finished head, with a license and after a dry run"
# Keys and choices that are gone -> why, and the remedy.
REMOVED = {
    "drafter.confidence": "it belonged to drafter.tree=adaptive. Use drafter.tree=auto, which measures what pays",
    "drafter.reproducible": "use drafter.tree=fixed, whose steps have the same sizes in every run",
    "drafter.tree=adaptive": "use drafter.tree=auto, which measures how deep it pays to draft",
    "head.alpha": OF_MEDUSA2,
    "head.lora_alpha": OF_MEDUSA2,
    "hidden_states.top_k": "use hidden_states.dtype=float8 for a smaller store, which keeps all of the target's distribution",
    "hidden_states.verify": "a damaged file is found by its size. Leave the key out",
    "head=lilicorr": "it accepted less than DFlash, from which it builds. Use head=dflash",
    "head=medusa2": "it changed the target's text, and was slower than Medusa-1. Use head=medusa",
    "loss=coupled": "it gained nothing over loss=kl_div. Use that",
    "head=uno": "it cost two forwards of the target per step. Use head=dflash",
    "optimizer.head_multiplier": OF_MEDUSA2,
    "push_private": PUSH,
    "push_to_hub": PUSH,
    "recipe=gemma4_31b_eagle3": "use recipe=gemma4_26b_eagle3 target=google/gemma-4-31B-it",
    "recipe=glm52_eagle3": "use recipe=glm5_eagle3 target=zai-org/GLM-5.2",
    "recipe=qwen3_8b_eagle31": "use recipe=qwen3_8b_eagle3 head=eagle3_1",
    "recipe=vicuna_7b_medusa2": "head=medusa2 was removed. Use recipe=vicuna_7b_medusa1",
    "retry_errors": "the same command with output=FILE.jsonl answers failed prompts again",
    "trainer.gpu_tflops": "set trainer.profile=true to see what a step spends its time on",
    "trainer.head_lr_multiplier": OF_MEDUSA2,
}


def new_choice(key: str, value: object) -> str | None:
    """Return a sentence about the new spelling of KEY=VALUE, or about its removal, if the tables have it."""
    choice = f"{key}={value}"
    if choice in REMOVED:
        return f"{choice} was removed: {REMOVED[choice]}"
    return f"{choice} is {RENAMED[choice]} now" if choice in RENAMED else None


def new_key(key: str, known: Collection[str]) -> str | None:
    """Return a sentence about the new name of an unknown key, or of the part of it that was renamed or removed."""
    if key in known:
        return None
    if key in REMOVED:
        return f"{key} was removed: {REMOVED[key]}"
    parts = key.split(".")
    for old in (".".join(parts[:count]) for count in range(len(parts), 0, -1)):
        spellings = RENAMED.get(old, ())
        for new in (spellings,) if isinstance(spellings, str) else spellings:
            sure = new in known or (spellings == new and new.rpartition(".")[0] in known)  # another choice may have it
            if old not in known and sure:
                return f"{key} is {new}{key.removeprefix(old)} now"
    return None
