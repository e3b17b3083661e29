"""Measure which operations keep the bits of a row, whatever stands next to it:  python scripts/bench/bits.py [device=cuda]

A decoded text is the same with and without drafts, alone and in a batch, if every operation of the target does. The first row
of each operation is computed with several numbers of rows, of keys and of sequences; sizes in one pair of brackets give it
the same bits. Products have weights of `inputs` x `outputs`, attention has 8 heads of keys and 32 of queries.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from foredraft.cli import entry
from foredraft.heads.attention import masked, masks
from foredraft.heads.target_model import packing
from foredraft.heads.target_model.activations import BatchInvariantActivation

ROWS = (1, 2, 3, 4, 5, 8, 11, 16, 17, 24, 32, 33, 48, 64)
MORE = (128, 256, 512, 1024, 2048)  # that a GPU computes in no time
KEYS = (504, 512, 528, 640, 768, 1024, 2048, 4096)
SEEN = 500
SEQUENCES = (1, 2, 4, 8, 16)
WIDTHS = (1544, 4864)
SHAPES = ((576, 1536), (1536, 576), (4096, 1024), (4096, 4096), (4096, 12288), (12288, 4096))


def alike(rows: Sequence[Tensor], sizes: Sequence[int]) -> str:
    """Group the sizes at which the row has equal bits."""
    groups: list[tuple[Tensor, list[int]]] = []
    for row, size in zip(rows, sizes, strict=True):
        same = next((members for other, members in groups if torch.equal(other, row)), None)
        if same is None:
            groups.append((row, [size]))
        else:
            same.append(size)
    return " ".join(str(members) for _, members in groups)


def products(device: str, dtype: torch.dtype) -> None:
    sizes = ROWS + (MORE if device == "cuda" else ())
    for inputs, outputs in SHAPES:
        linear = nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype).requires_grad_(False)
        x = torch.randn(max(sizes), inputs, device=device, dtype=dtype)
        kinds: dict[str, nn.Module] = {"product": linear}
        if device == "cpu" and packing.is_faster(dtype):
            kinds["product packed for oneDNN"] = packing.PackedLinear(linear)
        for name, kind in kinds.items():
            rows = [kind(x[:count])[0] for count in sizes]
            print(f"  {name}, {inputs} x {outputs}, rows: {alike(rows, sizes)}")


def activations(device: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        x = torch.randn(2 * max(ROWS), width, device=device, dtype=dtype)
        for name, kind in (("SiLU", nn.SiLU()), ("SiLU of whole vectors", BatchInvariantActivation(nn.SiLU()))):
            # Only a few numbers are rounded differently: of many first rows.
            rows = [torch.cat([kind(x[start : start + count])[0] for start in range(max(ROWS))]) for count in ROWS]
            print(f"  {name}, {width} wide, rows: {alike(rows, ROWS)}")


def attention(device: str, dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(16, heads, 4096, 128, device=device, dtype=dtype) for heads in (32, 8, 8))

    def first(sequences: int, rows: int, keys: int, attend: Callable[..., Tensor]) -> Tensor:
        mask = masks.additive_mask(torch.arange(keys, device=device).expand(1, 1, rows, -1) < SEEN, dtype)
        few = query[:1, :, :rows], key[:1, :, :keys], value[:1, :, :keys]
        inputs = (x.expand(sequences, -1, -1, -1) for x in few)
        return attend(*inputs, mask.expand(sequences, -1, -1, -1))[0, :, 0]

    def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    for name, attend in (("torch's attention", plain), ("ours", masked.attend)):
        print(f"  {name}, queries: {alike([first(1, rows, 512, attend) for rows in ROWS], ROWS)}")
        print(f"  {name}, keys: {alike([first(1, 8, keys, attend) for keys in KEYS], KEYS)}")
        print(f"  {name}, sequences: {alike([first(batch, 8, 512, attend) for batch in SEQUENCES], SEQUENCES)}")


@entry("bits")
@torch.inference_mode()
def main(cfg: DictConfig) -> None:
    torch.manual_seed(0)
    if not cfg.split_k:
        # Sums of a product are not divided among processors by its number of rows. Only cuBLASLt can do without.
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    for dtype in (torch.bfloat16, torch.float32):
        print(f"{str(dtype).removeprefix('torch.')} on {cfg.device}, torch {torch.__version__}")
        products(cfg.device, dtype)
        activations(cfg.device, dtype)
        attention(cfg.device, dtype)


if __name__ == "__main__":
    main()
