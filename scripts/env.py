"""Print what a bug report needs: versions, devices, dtype and attention paths of this machine, and what is disabled and why.

Each topic has one line. With target=ORG/NAME it also says whether that target keeps the bits of a text with drafts and in a
batch. This command needs no extra: what is not installed is part of the report.
"""

import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

import foredraft


def main() -> None:
    target = None
    for argument in sys.argv[1:]:
        key, _, target = argument.partition("=")
        if key != "target" or not target:
            print(f"error: foredraft env takes target=ORG/NAME, or nothing, not {argument}", file=sys.stderr)
            raise SystemExit(2)
    for topic, state in [*machine(), *packages(), *torch_paths(target)]:
        print(f"{topic + ':':25} {state}")


def machine() -> Iterator[tuple[str, str]]:
    """Yield what is known without torch."""
    yield "foredraft", f"{foredraft.__version__} in {os.path.dirname(foredraft.__file__)}"
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", platform.platform()
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    yield "C++ compiler", compiler or "disabled: none found, which torch.compile on a CPU needs"
    yield "variables", ", ".join(sorted(name for name in os.environ if name.startswith("FOREDRAFT_"))) or "none"


def packages() -> Iterator[tuple[str, str]]:
    """Yield the version of every package that foredraft names, then for every extra whether it is complete."""
    try:
        required = [Requirement(line) for line in metadata.requires("foredraft") or []]
    except metadata.PackageNotFoundError:
        yield "packages", "foredraft runs from a checkout that is not installed: pip install -e ."
        return
    missing: dict[str, list[str]] = {}  # by extra
    shown: dict[str, str] = {}
    for requirement in required:
        name, extras = requirement.name, re.findall(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
        extra = extras[0] if extras else ""
        if extra in ("dev", "serve-test", "docs") or name == "foredraft":
            continue
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            shown[name] = "not installed"
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                missing.setdefault(extra, []).append(name)
            continue
        fits = requirement.specifier.contains(version, prereleases=True)  # an extra may narrow the range
        if name not in shown or not fits:
            shown[name] = version if fits else f"{version}, which is outside {requirement.specifier}"
    yield from sorted(shown.items())
    for extra, names in missing.items():
        install = f"foredraft[{extra}]" if extra else "foredraft"
        yield f"extra {extra}" if extra else "required", f"disabled: needs {', '.join(names)}: pip install '{install}'"


def torch_paths(target: str | None) -> Iterator[tuple[str, str]]:
    """Yield devices, and for each what is computed there and how. target: as typed, whose bits are of interest, too."""
    try:
        import torch

        from foredraft.heads.attention import flex
        from foredraft.heads.caches.device import device_name
        from foredraft.heads.target_model import packing
        from foredraft.heads.target_model.loading import has_bfloat16_products
    except Exception as error:  # a broken installation is what this command is for
        yield "import", f"failed: {type(error).__name__}: {error}"
        return
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    yield "CPU", f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores"
    level = torch.backends.cpu.get_cpu_capability()
    features = {"AVX512_BF16": torch.cpu._is_avx512_bf16_supported(), "AMX": torch.cpu._is_amx_tile_supported()}
    yield "CPU features", ", ".join([level, *(f"{name} {'yes' if has else 'no'}" for name, has in features.items())])
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        capability = f"compute capability {about.major}.{about.minor}"
        yield f"GPU {number}", f"{about.name}, {about.total_memory / 2**30:.1f} GiB, {capability}"
    if not gpu:
        yield "GPU", f"none that torch {torch.__version__} can use"
    yield "device", f"{device.type}, the default of target.device"
    if has_bfloat16_products(device):
        yield "dtype=auto", "the dtype of the checkpoint: this device has products in bfloat16"
    else:
        need = "compute capability 8.0" if gpu else "AVX512_BF16, AMX or ARM's BF16"
        yield "dtype=auto", f"float32: this device has no fast products in bfloat16, which need {need}"
    for kind in ("bfloat16", "float32"):
        yield f"bits in {kind}", f"{bits('test_model', kind, device)} (test model)"
    if target is None:
        yield "bits of others", "measured at load; foredraft env target=ORG/NAME shows them"
    else:
        yield f"bits of {target}", bits(target, "auto", device)
    flexible = "disabled: only for training on a GPU; a CPU attends document by document"
    if gpu:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            works = flex.kernel_available(device, torch.bfloat16, 8, 2, 128)
        flexible = "works" if works else f"disabled: {caught[-1].message}"
    yield "FlexAttention", flexible
    for dtype in packing.DTYPES:
        name = str(dtype).removeprefix("torch.")
        works = not gpu and packing.is_faster(dtype)
        why = "this CPU or this build of torch would not be faster" if not gpu else "only for targets on a CPU"
        yield f"packed products {name}", "works" if works else f"disabled: {why}"


def bits(name: str, dtype: str, device: Any) -> str:
    """Return whether a target's logits for a token depend on what is computed in the same forward."""
    import torch

    from foredraft.heads import Target
    from foredraft.heads.target_model.capabilities import is_batch_invariant
    from foredraft.words import target_path

    try:
        target = Target.from_pretrained(target_path(name), dtype=dtype, device=device)
        able = target.capabilities
        same = able.prefers_chains if target.device.type == "cpu" else able.trees and is_batch_invariant(target)
    except Exception as error:  # a broken installation is what this command is for
        return f"failed: {type(error).__name__}: {error}"
    if same:
        drafts = "drafts change" if able.keeps_bits else "drafted chains change"
        return f"the same for a token whatever is computed with it: {drafts} no text"
    ties = "near-ties within a millionth" if target.dtype == torch.float32 else "near-ties"
    return f"depend on what is computed with a token{'' if able.trees else f' ({able.why})'}: {ties} may fall the other way"
