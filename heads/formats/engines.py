"""The layouts that engines read, and the commands that load them: the choices of `foredraft export format=...`.

Each function takes a head and its target and returns the layout for one engine. It raises ValueError if the engine would
not load the head, or would draft with it incorrectly.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from foredraft.heads import formats
from foredraft.heads.base import DraftHead
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.dflash2 import DFlash2Head
from foredraft.heads.domino import DominoHead
from foredraft.heads.dspark import DSparkHead
from foredraft.heads.eagle import EagleHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.formats.base import Format
from foredraft.heads.formats.engine_checks import (
    check_full_vocabulary,
    check_in_place,
    check_layer_flags,
    check_llama_layer,
    check_llamacpp_blocks,
    check_llamacpp_eagle3,
    check_llamacpp_layers,
    check_vanilla,
    unsupported,
)
from foredraft.heads.formats.gguf.layout import GGUFFormat
from foredraft.heads.formats.gguf.nextn import NextnFormat
from foredraft.heads.formats.gguf.tensors import DTYPES
from foredraft.heads.formats.hydra import check_tied
from foredraft.heads.formats.layer_ids import as_sglang_reads, for_sglang
from foredraft.heads.hydra import HydraHead
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.mtp import PREFIX, MTPHead
from foredraft.heads.p_eagle import PEagleHead
from foredraft.heads.target import Target
from foredraft.heads.target.files import weight_map
from foredraft.heads.xpress import XPressHead

VLLM = """vllm serve {target} --speculative-config '{{"method": "{method}", "model": "{head}", \
"num_speculative_tokens": {depth}}}'"""
VLLM_P_EAGLE = """vllm serve {target} --speculative-config '{{"method": "eagle3", "model": "{head}", \
"parallel_drafting": true, "num_speculative_tokens": {depth}}}'"""
VLLM_MTP = """vllm serve {head} --speculative-config '{{"method": "mtp", "num_speculative_tokens": {depth}}}'"""
# One method covers a family of drafters, whatever the head's architecture.
VLLM_DFLASH = VLLM.replace("{method}", "dflash")
# SGLang's algorithms are in capitals. It reads the size of a block from config.json: `--speculative-num-draft-tokens` would
# also count the anchor.
SGLANG_BLOCK = """python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} \
--speculative-draft-model-path {head}"""
SGLANG = f"""{SGLANG_BLOCK} --speculative-num-steps {{depth}} --speculative-eagle-topk 4 \
--speculative-num-draft-tokens 16"""

XPRESS = "vLLM 0.32 does not support xPress; its pull request 54448 and the authors' branch do. It drafts a chain."

LLAMACPP = """llama-server -m TARGET.gguf -md {head}/head.gguf --spec-type draft-{method} --spec-draft-n-max {depth}"""
LLAMACPP_TARGET = "python convert_hf_to_gguf.py {target} --outfile TARGET.gguf"

EA_MODEL = "EaModel.from_pretrained(base_model_path='{target}', ea_model_path='{head}')"


class Export(NamedTuple):
    layout: Format
    use: str  # the command that loads it, a template for `command`
    note: str = ""  # what the engine does not support

    def command(self, head: DraftHead, target: str, directory: str) -> str:
        """Return the command for this head, which was written to this directory, and the target of this name."""
        names = {"method": head.kind, "algorithm": head.kind.upper()}
        return self.use.format(target=target, head=directory, depth=head.depth, **names)


CHAIN = "vLLM drafts a chain, not a tree."
VLLM_EXPORTS: dict[type[DraftHead], Export] = {
    Eagle3Head: Export(formats.Eagle3Format(), VLLM, CHAIN),
    EagleHead: Export(formats.EagleFormat("EagleLlamaForCausalLM"), VLLM, CHAIN),
    DFlashHead: Export(formats.DFlashFormat(), VLLM, CHAIN),
    DFlash2Head: Export(formats.DFlash2Format(), VLLM_DFLASH, CHAIN),
    XPressHead: Export(formats.XPressFormat(), VLLM, XPRESS),
    DSparkHead: Export(formats.SpeculatorsDSpark(), VLLM, CHAIN),
    PEagleHead: Export(formats.PEagleFormat(), VLLM_P_EAGLE, CHAIN),
}


def vllm(head: DraftHead, target: Target) -> Export:
    if isinstance(head, EagleHead) and head.fc.bias is not None:
        raise ValueError("vLLM's EAGLE-1 has no fc.bias, and this head does: train it with head.bias=false")
    if isinstance(head, XPressHead):
        check_full_vocabulary("vLLM's xPress", head)
        check_in_place("vLLM's xPress", head)
    if isinstance(head, DSparkHead):
        check_vanilla("vLLM", head)
    if type(head) not in VLLM_EXPORTS:
        raise unsupported("vLLM", head)
    return VLLM_EXPORTS[type(head)]


def sglang(head: DraftHead, target: Target) -> Export:
    if isinstance(head, EagleHead):
        return Export(
            formats.EagleFormat(bias=True),
            SGLANG,
            "SGLang's fc has a bias; if the head has none, one of zeros is written.",
        )
    if isinstance(head, DFlashHead):
        check_full_vocabulary("SGLang's block drafting", head)
    if isinstance(head, DSparkHead | DominoHead):
        if isinstance(head, DominoHead) and head.pure != 1:
            raise ValueError(f"SGLang's Domino has head.pure_draft_prefix_len=1, and this head has {head.pure}")
        layout = formats.DSparkFormat() if isinstance(head, DSparkHead) else formats.DominoFormat()
        return Export(layout, SGLANG_BLOCK, "SGLang drafts a chain, not a tree.")
    if type(head) is DFlashHead:
        return Export(formats.DFlashFormat(), SGLANG_BLOCK, "SGLang drafts a chain, not a tree.")
    if not isinstance(head, Eagle3Head):
        raise unsupported("SGLang", head)
    if len(head.layers) != 3:
        raise ValueError(f"SGLang fuses three layers, and this head takes hidden states {head.layers}")
    if head.layers[0] == 0:
        raise ValueError(
            "SGLang provides outputs of decoder layers, and this head takes the embedding (hidden state 0)"
        )
    if as_sglang_reads(for_sglang(head.layers, target), target) != head.layers:
        raise ValueError(
            "SGLang reads layer ids that start with 1 as one less, and this head takes hidden states "
            f"{head.layers}: use vLLM"
        )
    check_layer_flags("SGLang", head, supported=("norm_before_fc", "fc_norm", "norm_output"))
    extras = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if head.to_config()[name]]
    note = f"{', '.join(extras)}: supported by SGLang since its pull requests 24663 and 32334 (2026)." if extras else ""
    return Export(formats.Eagle3Format(), SGLANG, note)


def speculators(head: DraftHead, target: Target) -> Export:
    if isinstance(head, DFlashHead) and head.window is not None and not head.causal:
        raise ValueError(
            "vLLM reads heads of the speculators package as causal in all layers or in none, and this one only in its "
            f"sliding layers (head.window={head.window}): use format=vllm"
        )
    if isinstance(head, DSparkHead):
        check_vanilla("vLLM", head)
        return Export(
            formats.SpeculatorsDSpark(), "vllm serve {head}", "vLLM finds the target by its name in config.json."
        )
    if isinstance(head, XPressHead):
        if head.inner % head.correction:
            raise ValueError(
                f"the speculators package needs head.xpress_mlp_hidden={head.inner} to be a multiple of head.xpress_rank="
                f"{head.correction}: use format=vllm"
            )
        return Export(formats.SpeculatorsXPress(), "vllm serve {head}", XPRESS)
    if type(head) is DFlashHead:
        return Export(
            formats.SpeculatorsDFlash(), "vllm serve {head}", "vLLM finds the target by its name in config.json."
        )
    if isinstance(head, PEagleHead):
        note = "vLLM finds the target by its name in config.json, and P-EAGLE's files by method=eagle3."
        return Export(formats.SpeculatorsPEagle(), VLLM_P_EAGLE, note)
    if not isinstance(head, Eagle3Head):
        raise unsupported("the speculators package", head)
    check_llama_layer("the speculators package", head)
    return Export(formats.SpeculatorsFormat(), "vllm serve {head}", "vLLM finds the target by its name in config.json.")


def eagle(head: DraftHead, target: Target) -> Export:
    if isinstance(head, EagleHead):
        return Export(formats.EagleFormat("LlamaForCausalLM", embeddings=True), EA_MODEL)
    if not isinstance(head, Eagle3Head):
        raise unsupported("SafeAILab's code", head)
    n = target.num_layers
    if head.layers != [2, n // 2, n - 3]:
        raise ValueError(
            f"SafeAILab's code takes hidden states {[2, n // 2, n - 3]} of a target of {n} layers, regardless of config.json,"
            f" and this head takes {head.layers}"
        )
    check_layer_flags("SafeAILab's code", head)
    return Export(formats.Eagle3Format(), EA_MODEL)


def medusa(head: DraftHead, target: Target) -> Export:
    if type(head) is not MedusaHead:
        raise unsupported("FasterDecoding's code", head)
    check_full_vocabulary("FasterDecoding's code", head)
    note = "medusa_lm_head.pt is for FasterDecoding's code, which reads nothing else; TGI reads the safetensors."
    return Export(formats.MedusaFormat(), "text-generation-launcher --model-id {head}", note)


def hydra(head: DraftHead, target: Target) -> Export:
    if not isinstance(head, HydraHead):
        raise unsupported("zankner's code", head)
    check_full_vocabulary("zankner's code", head)
    check_tied(head)
    return Export(
        formats.HydraFormat(),
        "HydraModel.from_pretrained('{head}')",
        "hydra_lm_head.pt is the file for zankner's code.",
    )


def mtp(head: DraftHead, target: Target) -> Export:
    if not isinstance(head, MTPHead):
        raise unsupported("a target's own file", head)
    if not weight_map(target):
        raise ValueError(f"{target.name} has no local checkpoint in safetensors, into which the layer could be written")
    shipped = any(name.startswith(PREFIX) for name in weight_map(target))
    note = "" if shipped else "Engines look for an MTP layer if config.json announces one, and this target's does not."
    return Export(formats.MTPFormat(), VLLM_MTP, note)


def llamacpp(head: DraftHead, target: Target, dtype: str = "float16", target_gguf: str | None = None) -> Export:
    """Export for llama.cpp. dtype: one of heads/formats/gguf's DTYPES. target_gguf: a GGUF of the target, whose tokenizer
    is copied."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} is not one of {', '.join(DTYPES)}")
    if isinstance(head, MTPHead):
        return llamacpp_mtp(head, target, dtype, target_gguf)
    if not isinstance(head, Eagle3Head) and type(head) not in (DFlashHead, DFlash2Head, DSparkHead):
        raise ValueError(
            f"{unsupported('llama.cpp', head)}: it loads EAGLE-3, DFlash, JetSpec, DFlash-2, DSpark and MTP"
        )
    check_llamacpp_layers(head, target)
    if isinstance(head, Eagle3Head):
        check_llamacpp_eagle3(head)
    else:
        assert isinstance(head, DFlashHead)
        check_llamacpp_blocks(head)
    method = "dflash" if isinstance(head, DFlash2Head) else head.kind
    convert = LLAMACPP_TARGET.format(target=target.name)
    note = (
        f"llama.cpp drafts a chain, not a tree. Its own converter writes the target: {convert}\n"
        f"From the start: foredraft train target={target.name} head={head.kind} output_dir=outputs/mine; foredraft "
        "export checkpoint=outputs/mine/head format=gguf output_dir=exported; then llama-server as below.\n"
        "Its cache of keys and values is in half precision, where ties may be decided differently, unless it is started "
        "with -fa off -ctk f32 -ctv f32."
    )
    layout = formats.default_format(head)
    return Export(GGUFFormat(layout, dtype, target_gguf), LLAMACPP.replace("{method}", method), note)


def llamacpp_mtp(head: MTPHead, target: Target, dtype: str, target_gguf: str | None) -> Export:
    mtp(head, target)  # for its checks
    attention = head.layer.self_attn
    if not target.config.model_type.startswith("qwen3_5") or not (attention.gated and attention.normed):
        raise ValueError(
            "llama.cpp only loads MTP layers without experts of Qwen3.5, with a gate and q/k norms, and this one "
            f"belongs to a target of type {target.config.model_type}"
            f"{'' if attention.gated and attention.normed else ', without these'}: train head=eagle3 for llama.cpp, or "
            "export this with format=mtp for vLLM"
        )
    convert = LLAMACPP_TARGET.format(target=target.name)
    note = (
        f"llama.cpp drafts a chain, not a tree. Its own converter writes the target: {convert} --no-mtp\n"
        "For one file with both: export with format=mtp, convert that directory without --no-mtp, and omit -md."
    )
    return Export(NextnFormat(dtype, target_gguf), LLAMACPP, note)


FORMATS = {  # each with the description that --help shows
    "vllm": ("The layout that vLLM loads.", vllm),
    "sglang": ("The layout that SGLang loads.", sglang),
    "speculators": ("The layout of the speculators library, which vLLM loads too.", speculators),
    "eagle": ("The layout of the EAGLE authors.", eagle),
    "medusa": ("The layout of the Medusa authors, which Text Generation Inference loads too.", medusa),
    "hydra": ("The layout of the Hydra authors.", hydra),
    "mtp": ("The target's own files with this MTP layer in place of theirs.", mtp),
    "gguf": ("GGUF, which llama.cpp loads; dtype= and target_gguf= are for this format.", llamacpp),
}
# Engines, and the formats that they read: a card names the first that supports the head.
ENGINES = {
    "vLLM": ("vllm", "speculators", "mtp"),
    "SGLang": ("sglang",),
    "Text Generation Inference": ("medusa",),
    "llama.cpp": ("gguf",),
}


def exporter_for(name: str, **options: str | None) -> Callable[[DraftHead, Target], Export]:
    """Return the function for the format of this name. options: dtype and target_gguf of "gguf", None unless given."""
    if name not in FORMATS:
        raise ValueError(f"format={name} is not one of {', '.join(FORMATS)}")
    given = {key: value for key, value in options.items() if value is not None}
    for key, value in given.items() if name != "gguf" else ():
        raise ValueError(f"{key}={value} is only for format=gguf: leave it out with format={name}")
    exporter: Callable[..., Export] = FORMATS[name][1]
    return partial(exporter, **given)


def engines(head: DraftHead, target: Target, name: str) -> list[dict[str, Any]]:
    """Return, for the model card, each engine that loads the head, the `format` of export (None for the files that training
    writes), and the `command`, with {head} still to be filled in. name: of the target, for the commands."""
    trained, supported = formats.default_format(head), []
    for engine, names in ENGINES.items():
        for layout in names:
            try:
                export = FORMATS[layout][1](head, target)
            except ValueError:
                continue
            same = type(export.layout) is type(trained) and vars(export.layout) == vars(trained)
            command = export.command(head, name, "{head}")
            supported.append({"engine": engine, "format": None if same else layout, "command": command})
            break
    return supported
