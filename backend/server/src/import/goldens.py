"""Makes golden.safetensors: random blocks of every GGUF type that the importer reads, and their values.

    python3 -m pip install gguf==0.19.0 numpy safetensors
    python3 goldens.py
"""

from importlib.metadata import version
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.numpy import save_file

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]

# Where a block holds half-precision scales and minimums, in bytes from its start.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def blocks_of(name: str, rng: np.random.Generator) -> np.ndarray:
    """Random codes under finite random scales; enough blocks for at least 512 values."""
    block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    count = max(4, 512 // block_len)
    if name in ("F32", "F16", "BF16"):
        values = rng.standard_normal(count).astype(np.float32)
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float32 if name == "F32" else np.float16).view(np.uint8)
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        # From subnormal to large: every rounding of the products shows.
        scales = rng.standard_normal(count) * 10.0 ** rng.uniform(-6, 1, count)
        blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8).reshape(count, 2)
    return blocks.reshape(-1)


def main() -> None:
    rng = np.random.default_rng(20)
    tensors = {}
    for name in TYPES:
        blocks = blocks_of(name, rng)
        tensors[f"{name}.blocks"] = blocks
        tensors[f"{name}.values"] = dequantize(blocks, GGMLQuantizationType[name]).astype(np.float32).reshape(-1)
        assert np.isfinite(tensors[f"{name}.values"]).all(), name
    metadata = {"made_by": "goldens.py", "gguf": version("gguf"), "numpy": np.__version__}
    save_file(tensors, Path(__file__).with_name("golden.safetensors"), metadata)


if __name__ == "__main__":
    main()
