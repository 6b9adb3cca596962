"""Reads a GGUF file (version 3): its metadata, and its tensors as fp32. The formats are those that llama.cpp documents.

Types: F32, F16, Q4_0, Q4_1, Q8_0. A block is 32 weights of a row with one fp16 scale d (and in Q4_1 a minimum m):
Q4_0 is d (q - 8), Q4_1 is d q + m, Q8_0 is d q. Of a block's 16 bytes of nibbles the low ones are weights 0 to 15.
"""

import struct

import numpy as np

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
# Type -> weights and bytes of a block.
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34)}


class Reader:
    """`metadata` maps keys to values; `tensor(name)` is fp32 in row-major order, rows first."""

    def __init__(self, path):
        self.data = np.memmap(path, mode="r")
        self.at = 0
        magic, version, num_tensors, num_keys = struct.unpack("<4sIQQ", self._take(24))
        if magic != b"GGUF" or version != 3:
            raise SystemExit(f"{path} is no GGUF file of version 3")
        self.metadata = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        self.tensors = {}
        for _ in range(num_tensors):
            name = self._string()
            num_dims = self._scalar("<I")
            # The row's length comes first in the file.
            shape = [self._scalar("<Q") for _ in range(num_dims)][::-1]
            kind, offset = self._scalar("<I"), self._scalar("<Q")
            self.tensors[name] = (shape, kind, offset)
        align = self.metadata.get("general.alignment", 32)
        self.base = -(-self.at // align) * align

    def _take(self, size):
        self.at += size
        return self.data[self.at - size : self.at].tobytes()

    def _scalar(self, code):
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _string(self):
        return self._take(self._scalar("<Q")).decode(errors="replace")

    def _value(self, kind):
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item, count = self._scalar("<I"), self._scalar("<Q")
            return [self._value(item) for _ in range(count)]
        return self._scalar(SCALARS[kind])

    def tensor(self, name):
        shape, kind, offset = self.tensors[name]
        if kind not in BLOCKS:
            raise SystemExit(f"tensor {name} has type {kind}: only {sorted(BLOCKS)} are read")
        weights, size = BLOCKS[kind]
        count = int(np.prod(shape)) // weights
        start = self.base + offset
        blocks = self.data[start : start + count * size].reshape(count, size)
        return _dequantize(blocks, kind).reshape(shape)


def _dequantize(blocks, kind):
    """Blocks (n, bytes) -> fp32 weights (n, weights of a block)."""
    if kind == 0:
        return blocks.copy().view("<f4").astype(np.float32)
    if kind == 1:
        return blocks.copy().view("<f2").astype(np.float32)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if kind == 8:
        return blocks[:, 2:].view(np.int8).astype(np.float32) * scale
    nibbles = blocks[:, 4:] if kind == 3 else blocks[:, 2:]
    values = np.concatenate((nibbles & 15, nibbles >> 4), 1).astype(np.float32)
    if kind == 2:
        return (values - 8) * scale
    return values * scale + blocks[:, 2:4].copy().view("<f2").astype(np.float32)
