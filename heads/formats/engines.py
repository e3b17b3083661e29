"""The layouts that engines read, and the commands that load them: the choices of `foredraft export format=...`.

RULES has one line for each format and kind of head: the layout, the command that loads it, a note, and checks. A check
raises ValueError if the engine would not load the head, or would draft with it incorrectly.
"""

import json
import shlex
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
from foredraft.heads.formats import engine_checks as checks
from foredraft.heads.formats.base import Format
from foredraft.heads.formats.engine_checks import Check
from foredraft.heads.formats.gguf.layout import GGUFFormat, NextnFormat
from foredraft.heads.formats.gguf.tensors import DTYPES
from foredraft.heads.formats.hydra import check_tied
from foredraft.heads.hydra import HydraHead
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.mtp import PREFIX, MTPHead
from foredraft.heads.p_eagle import PEagleHead
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.files import WEIGHTS, weight_map
from foredraft.heads.xpress import XPressHead

VLLM = """vllm serve {target} --speculative-config '{{"method": "{method}", "model": "{head}", \
"num_speculative_tokens": {depth}}}'"""
VLLM_P_EAGLE = """vllm serve {target} --speculative-config '{{"method": "eagle3", "model": "{head}", \
"parallel_drafting": true, "num_speculative_tokens": {depth}}}'"""
VLLM_MTP = """vllm serve {head} --speculative-config '{{"method": "mtp", "num_speculative_tokens": {depth}}}'"""
# One method covers a family of drafters, whatever the head's architecture.
VLLM_DFLASH = VLLM.replace("{method}", "dflash")
# SGLang's algorithms are in capitals, and DFLASH is also that of DFlash-2 and Domino. It reads the size of a block from
# config.json: `--speculative-num-draft-tokens` would also count the anchor.
SGLANG_BLOCK = """python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} \
--speculative-draft-model-path {head}"""
SGLANG_DFLASH = SGLANG_BLOCK.replace("{algorithm}", "DFLASH")
SGLANG_TREE = "--speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
SGLANG = f"{SGLANG_BLOCK} --speculative-num-steps {{depth}} {SGLANG_TREE}"
SPECULATORS = "vllm serve {head}"
TRANSFORMERS = """AutoModelForCausalLM.from_pretrained('{target}').generate(**inputs, \
assistant_model=AutoModel.from_pretrained('{head}'), speculation_type='dflash')"""
TGI = "text-generation-launcher --model-id {head}"
HYDRA_CODE = "HydraModel.from_pretrained('{head}')"
EA_MODEL = "EaModel.from_pretrained(base_model_path='{target}', ea_model_path='{head}')"
LLAMACPP = """llama-server -m TARGET.gguf -md {head}/head.gguf --spec-type draft-{method} --spec-draft-n-max {depth}"""
LLAMACPP_DFLASH = LLAMACPP.replace("{method}", "dflash")
LLAMACPP_TARGET = "python convert_hf_to_gguf.py {target} --outfile TARGET.gguf"

# Notes: what the engine does not support, and how it loads the files.
VLLM_CHAIN = "vLLM drafts a chain, not a tree."
XPRESS = f"{VLLM_CHAIN} It supports xPress since 0.33."
XPRESS_PACKAGE = "vLLM 0.33 reads xPress heads only in format=vllm."
SGLANG_CHAIN = "SGLang drafts a chain, not a tree."
SGLANG_SELECTOR = f"{SGLANG_CHAIN} It supports DFlash-2 since 0.5.19."
SGLANG_DOMINO = f"{SGLANG_CHAIN} It supports Domino since 0.5.20."
SGLANG_BIAS = "SGLang's fc has a bias; if the head has none, one of zeros is written."
BY_NAME = "vLLM finds the target by its name in config.json."
P_EAGLE = "vLLM finds the target by its name in config.json, and P-EAGLE's files by method=eagle3."
TRANSFORMERS_CHAIN = "transformers drafts a chain, for one sequence at a time."
MEDUSA = "medusa_lm_head.pt is for FasterDecoding's code, which reads nothing else; TGI reads the safetensors."
HYDRA = "hydra_lm_head.pt is the file for zankner's code."
LLAMACPP_CHAIN = f"llama.cpp drafts a chain, not a tree. Its own converter writes the target: {LLAMACPP_TARGET}"
LLAMACPP_START = f"""{LLAMACPP_CHAIN}
From the start: foredraft train target={{target}} head={{kind}} output_dir=outputs/mine; foredraft \
export checkpoint=outputs/mine/head format=gguf output_dir=exported; then llama-server as below.
Its cache of keys and values is in half precision, where ties may be decided differently, unless it is started \
with -fa off -ctk f32 -ctv f32."""
LLAMACPP_MTP = f"""{LLAMACPP_CHAIN} --no-mtp
For one file with both: export with format=mtp, convert that directory without --no-mtp, and omit -md."""
IMAGES = """{engine} gives this head the features of images as embeddings, and heads here learn from those of their \
placeholders: after images, fewer drafts may be accepted."""
WINDOW = (
    "{engine} does not support head.window={window}: in longer texts the head sees all, and fewer drafts are accepted."
)
LONGROPE = "vLLM takes longrope's factors for long texts at all positions, unless texts end at {limit} tokens."
SGLANG_YARN = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate")
SGLANG_FLAGS = ("norm_before_fc", "fc_norm", "norm_output")


def fill(command: str, **paths: str) -> str:
    """Fill paths into a command as a shell reads them: quoted, and within the JSON of an argument as part of its quotes."""
    for name, path in paths.items():
        inner = json.dumps(path, ensure_ascii=False).replace("'", "'\\''")
        command = command.replace(f'"{{{name}}}"', inner).replace(f"'{{{name}}}'", repr(path))
        command = command.replace(f"{{{name}}}", shlex.quote(path))
    return command


class Export(NamedTuple):
    layout: Format
    use: str  # the command that loads it, a template for `command`
    note: str = ""  # what the engine does not support

    def command(self, head: DraftHead, target: str, directory: str, drafts: int | None = None) -> str:
        """Return the command for this head, which was written to this directory, and the target of this name; their paths are
        quoted. drafts: per step; None for the head's depth, but at least 3 for EAGLE-1, which learns one depth and drafts
        more."""
        depth = drafts or max(head.depth, 3 if head.kind == "eagle" else 1)
        names = {"method": head.kind, "algorithm": head.kind.upper(), "target": "{target}", "head": "{head}"}
        paths = {"target": target} | ({} if directory == "{head}" else {"head": directory})
        return fill(self.use.format(depth=depth, **names), **paths)


def flags_note(head: DraftHead, target: Target) -> str:
    extras = [name for name in SGLANG_FLAGS if head.to_config()[name]]
    return f"{', '.join(extras)}: supported by SGLang since its pull requests 24663 and 32334 (2026)." if extras else ""


def mtp_note(head: DraftHead, target: Target) -> str:
    if any(name.startswith(PREFIX) for name in weight_map(target)):
        return ""
    return "Engines look for an MTP layer if config.json announces one, and this target's does not."


def window_of(head: DraftHead, target: Target) -> int | None:
    """Return the window of an EAGLE-3 head if the target's texts may be longer."""
    window = head.window if isinstance(head, Eagle3Head) else None
    return None if window is None or window >= (target.context or 10**9) else window


def images_note(engine: str, head: DraftHead, target: Target) -> str:
    """Return how an engine that embeds images for heads differs from training; nothing for the others."""
    embeds = (engine, type(head)) in (("vLLM", MTPHead), ("SGLang", Eagle3Head))
    return IMAGES.format(engine=engine) if embeds and target.images is not None else ""


def longrope_limit(rule: "Rule", head: DraftHead) -> int | None:
    """Return the length of texts from which vLLM, if this is its rule, rotates a longrope otherwise than transformers."""
    rope = {} if head.config is None else head.config.rope_parameters
    served = rule.use.startswith("vllm") and rope.get("rope_type") == "longrope"
    return rope["original_max_position_embeddings"] if served else None


class Rule(NamedTuple):
    layout: Callable[..., Format]
    use: str
    note: str | Callable[[DraftHead, Target], str] = ""  # {target} and {kind} are filled in
    checks: tuple[Check, ...] = ()


EAGLE_HEAD = partial(formats.EagleFormat, "EagleLlamaForCausalLM")
EAGLE_CODE = partial(formats.EagleFormat, "LlamaForCausalLM", embeddings=True)
SGLANG_EAGLE = partial(formats.EagleFormat, bias=True)
# Checks of several rules. Heads that correct the target's logits have those of PLAIN_LOGITS, too.
EAGLE_CHECKS = checks.PLAIN_EMBEDDINGS, checks.PLAIN_LM_HEAD
VLLM_EAGLE3 = checks.INNER_STATES, checks.VLLM_LATENT, checks.VLLM_STATE
VLLM_BLOCKS = checks.INNER_STATES, *EAGLE_CHECKS
VLLM_DFLASH_CHECKS = checks.IN_PLACE, *VLLM_BLOCKS
VLLM_DFLASH2 = (
    checks.IN_PLACE,
    checks.FULL_VOCABULARY,
    checks.SCALED_EMBEDDINGS,
    checks.INNER_STATES,
    checks.PLAIN_LM_HEAD,
)
VLLM_CORRECTED = checks.PLAIN_LOGITS, *VLLM_BLOCKS
SGLANG_ROPE = partial(checks.usual_yarn, read=SGLANG_YARN)
SGLANG_BLOCKS = (
    checks.FULL_VOCABULARY,
    checks.WHOLE_ROTATION,
    checks.INNER_STATES,
    checks.NO_EMBEDDING_NORM,
    checks.PLAIN_LM_HEAD,
    SGLANG_ROPE,
)
SGLANG_CORRECTED = *SGLANG_BLOCKS, checks.PLAIN_LOGITS
SGLANG_EAGLE3 = (
    *checks.SGLANG_LAYERS,
    partial(checks.layer_flags, supported=SGLANG_FLAGS),
    checks.INNER_STATES,
    SGLANG_ROPE,
)
TRANSFORMERS_CHECKS = (
    checks.FULL_VOCABULARY,
    checks.IN_PLACE,
    checks.WHOLE_BLOCK,
    checks.WHOLE_ROTATION,
    checks.NO_EMBEDDING_NORM,
)
LLAMACPP_LAYERS = checks.LLAMACPP_ROPE, checks.usual_yarn, checks.LLAMACPP_BIASES, checks.INNER_STATES
LLAMACPP_EAGLE3 = (
    *LLAMACPP_LAYERS,
    checks.WHOLE_ROTATION,
    checks.THREE_LAYERS,
    partial(checks.layer_flags, supported=("norm_before_residual", "norm_before_fc")),
)
LLAMACPP_BLOCK = *LLAMACPP_LAYERS, checks.SCALED_EMBEDDINGS, checks.PLAIN_LM_HEAD  # of any kind
LLAMACPP_DFLASH_CHECKS = *LLAMACPP_BLOCK, checks.IN_PLACE, checks.ONE_MASKING
LLAMACPP_DFLASH2 = *LLAMACPP_BLOCK, checks.IN_PLACE, checks.llamacpp_selector
LLAMACPP_DSPARK = *LLAMACPP_BLOCK, checks.VANILLA, checks.ONE_MASKING, checks.PLAIN_LOGITS

RULES: dict[str, dict[type[DraftHead], Rule]] = {
    "vllm": {
        Eagle3Head: Rule(formats.Eagle3Format, VLLM, VLLM_CHAIN, VLLM_EAGLE3),
        EagleHead: Rule(EAGLE_HEAD, VLLM, VLLM_CHAIN, (checks.VLLM_BIAS, checks.VLLM_STATE, *EAGLE_CHECKS)),
        DFlashHead: Rule(formats.DFlashFormat, VLLM, VLLM_CHAIN, VLLM_DFLASH_CHECKS),
        DFlash2Head: Rule(formats.DFlash2Format, VLLM_DFLASH, VLLM_CHAIN, VLLM_DFLASH2),
        XPressHead: Rule(
            formats.XPressFormat, VLLM_DFLASH, XPRESS, (checks.FULL_VOCABULARY, checks.IN_PLACE, *VLLM_CORRECTED)
        ),
        DSparkHead: Rule(formats.SpeculatorsDSpark, VLLM, VLLM_CHAIN, (checks.VANILLA, *VLLM_CORRECTED)),
        PEagleHead: Rule(formats.PEagleFormat, VLLM_P_EAGLE, VLLM_CHAIN, (checks.INNER_STATES,)),
    },
    "sglang": {
        Eagle3Head: Rule(formats.Eagle3Format, SGLANG, flags_note, SGLANG_EAGLE3),
        EagleHead: Rule(SGLANG_EAGLE, SGLANG, SGLANG_BIAS, (*EAGLE_CHECKS, checks.SGLANG_STATE, SGLANG_ROPE)),
        DFlashHead: Rule(formats.DFlashFormat, SGLANG_DFLASH, SGLANG_CHAIN, (*SGLANG_BLOCKS, checks.IN_PLACE)),
        DSparkHead: Rule(formats.DSparkFormat, SGLANG_BLOCK, SGLANG_CHAIN, (*SGLANG_CORRECTED, checks.ANCHOR_FIRST)),
        DFlash2Head: Rule(formats.DFlash2Format, SGLANG_DFLASH, SGLANG_SELECTOR, (*SGLANG_BLOCKS, checks.IN_PLACE)),
        DominoHead: Rule(formats.DominoFormat, SGLANG_DFLASH, SGLANG_DOMINO, (*SGLANG_CORRECTED, checks.SGLANG_PREFIX)),
    },
    "speculators": {
        Eagle3Head: Rule(
            formats.SpeculatorsFormat, SPECULATORS, BY_NAME, (checks.NO_LATENT_ATTENTION, checks.INNER_STATES)
        ),
        DFlashHead: Rule(
            formats.SpeculatorsDFlash, SPECULATORS, BY_NAME, (checks.SPECULATORS_MASKING, *VLLM_DFLASH_CHECKS)
        ),
        DSparkHead: Rule(
            formats.SpeculatorsDSpark,
            SPECULATORS,
            BY_NAME,
            (checks.SPECULATORS_MASKING, checks.VANILLA, *VLLM_CORRECTED),
        ),
        XPressHead: Rule(
            formats.SpeculatorsXPress,
            SPECULATORS,
            XPRESS_PACKAGE,
            (checks.SPECULATORS_MASKING, checks.SPECULATORS_RATIO, *VLLM_CORRECTED),
        ),
        PEagleHead: Rule(formats.SpeculatorsPEagle, VLLM_P_EAGLE, P_EAGLE, (checks.INNER_STATES,)),
    },
    "transformers": {
        DFlashHead: Rule(formats.TransformersDFlash, TRANSFORMERS, TRANSFORMERS_CHAIN, TRANSFORMERS_CHECKS),
    },
    "eagle": {
        Eagle3Head: Rule(
            formats.Eagle3Format, EA_MODEL, "", (checks.eagle_layers, checks.layer_flags, checks.EAGLE_ROPE)
        ),
        EagleHead: Rule(EAGLE_CODE, EA_MODEL, "", (checks.PLAIN_EMBEDDINGS,)),
    },
    "medusa": {MedusaHead: Rule(formats.MedusaFormat, TGI, MEDUSA, (checks.FULL_VOCABULARY,))},
    "hydra": {
        HydraHead: Rule(formats.HydraFormat, HYDRA_CODE, HYDRA, (checks.FULL_VOCABULARY, check_tied)),
    },
    "mtp": {MTPHead: Rule(formats.MTPFormat, VLLM_MTP, mtp_note, (checks.HAS_CHECKPOINT,))},
    "gguf": {
        Eagle3Head: Rule(GGUFFormat, LLAMACPP, LLAMACPP_START, LLAMACPP_EAGLE3),
        DFlashHead: Rule(GGUFFormat, LLAMACPP, LLAMACPP_START, LLAMACPP_DFLASH_CHECKS),
        DFlash2Head: Rule(GGUFFormat, LLAMACPP_DFLASH, LLAMACPP_START, LLAMACPP_DFLASH2),
        DSparkHead: Rule(GGUFFormat, LLAMACPP, LLAMACPP_START, LLAMACPP_DSPARK),
        MTPHead: Rule(NextnFormat, LLAMACPP, LLAMACPP_MTP, (checks.HAS_CHECKPOINT, checks.llamacpp_mtp)),
    },
}


FORMATS = {  # each with the description that --help shows, and what loads it
    "vllm": ("The layout that vLLM loads.", "vLLM"),
    "sglang": ("The layout that SGLang loads.", "SGLang"),
    "speculators": ("The layout of the speculators library, which vLLM loads too.", "vLLM"),
    "transformers": ("The layout that transformers drafts with, without any other package.", "transformers"),
    "eagle": ("The layout of the EAGLE authors.", "SafeAILab's code"),
    "medusa": ("The layout of the Medusa authors, which Text Generation Inference loads too.", "FasterDecoding's code"),
    "hydra": ("The layout of the Hydra authors.", "zankner's code"),
    "mtp": ("The target's own files with this MTP layer in place of theirs.", "vLLM"),
    "gguf": ("GGUF, which llama.cpp loads; dtype= and target_gguf= are for this format.", "llama.cpp"),
}
# Engines, and the formats that they read: a card names the first that supports the head.
ENGINES = {
    "vLLM": ("vllm", "speculators", "mtp"),
    "SGLang": ("sglang",),
    "transformers": ("transformers",),
    "Text Generation Inference": ("medusa",),
    "llama.cpp": ("gguf",),
}


def check_options(name: str, **options: str | None) -> dict[str, str]:
    """Return the options of `export_for` that are not None. Raises ValueError for one that the format does not have."""
    if name not in FORMATS:
        raise ValueError(f"format={name} is not one of {', '.join(FORMATS)}")
    given = {key: value for key, value in options.items() if value is not None}
    for key, value in given.items() if name != "gguf" else ():
        raise ValueError(f"{key}={value} is only for format=gguf: leave it out with format={name}")
    return given


def export_for(
    name: str, head: DraftHead, target: Target, dtype: str = "float16", target_gguf: str | None = None
) -> Export:
    """Return the layout, command and note of a head in the format of this name. Only for "gguf": dtype, one of
    heads/formats/gguf's DTYPES, and target_gguf, a GGUF of the target, whose tokenizer is copied."""
    engine = FORMATS[name][1]
    rule = RULES[name].get(type(head))
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} is not one of {', '.join(DTYPES)}")
    if rule is None:
        read = [other for other in ENGINES.get(engine, ()) if type(head) in RULES[other]]
        if read:
            raise ValueError(f"{engine} does not read {head.kind} heads in format={name}: use format={read[0]}")
        others = ": it loads EAGLE-3, DFlash, JetSpec, DFlash-2, DSpark and MTP" if name == "gguf" else ""
        others = " in format=speculators" if name == "speculators" else others
        raise ValueError(f"{engine} does not support {head.kind} heads{others}")
    for verify in rule.checks:
        verify(engine, head, target)
    note = rule.note if isinstance(rule.note, str) else rule.note(head, target)
    note, limit = note.format(target=shlex.quote(target.name), kind=head.kind), longrope_limit(rule, head)
    notes, use, window = [note, images_note(engine, head, target)], rule.use, window_of(head, target)
    if limit:
        notes.append(LONGROPE.format(limit=limit))
        use += f" --max-model-len {limit}"
    if window and engine == "SGLang":  # counts the positions before the query's own
        use += f" --speculative-draft-window-size {window - 1}"
    elif window and engine != "vLLM":
        notes.append(WINDOW.format(engine=engine, window=window))
    arguments = (formats.default_format(head), dtype, target_gguf) if name == "gguf" else ()
    return Export(rule.layout(*arguments), use, "\n".join(filter(None, notes)))


def engines(
    head: DraftHead, target: Target, name: str, drafts: int | None = None, written: Format | None = None
) -> list[dict[str, Any]]:
    """Return, for the model card, each engine that loads the head, the `format` of export (None where the engine loads the
    head's own files), and the `command`, whose {head} is for `fill`. name: of the target, for the commands. drafts: as for
    `Export.command`. written: layout of the head's files; None for the one that training writes."""
    written, supported = written or formats.default_format(head), []
    for engine, names in ENGINES.items():
        for layout in names:
            try:
                export = export_for(layout, head, target)
            except ValueError:
                continue
            same = type(export.layout) is type(written) and vars(export.layout) == vars(written)
            same = same and WEIGHTS in export.layout.weight_files  # TGI reads another name
            command = export.command(head, name, "{head}", drafts)
            supported.append({"engine": engine, "format": None if same else layout, "command": command})
            break
    return supported
