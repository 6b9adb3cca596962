"""Shapes and options, and where tensors live: one GPU in bf16, else the CPU in fp32."""

import time
from dataclasses import dataclass, fields, replace

import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
torch.backends.cuda.matmul.allow_tf32 = True

START = time.time()


def say(*what):
    """Prints with the seconds since the program began, at once."""
    print(f"[{time.time() - START:7.1f}]", *what, flush=True)


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-shaped base; the draft's layer has the same."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    eps: float


@dataclass(frozen=True)
class Options:
    """Every number that a run can be given as `name=value`; lists are written `1,2,3`."""

    # Text: rows decoded in lock step, tokens of each, rounds at most, and the share of the time that they may take.
    batch: int = 4096
    length: int = 516
    rounds: int = 16
    generate: float = 0.17
    # Held-out prompts to measure on, each at three temperatures. They ride along in the first round.
    held_out: int = 64
    # Likeliest tokens that are kept of each of the base's distributions.
    top: int = 64
    # Tokens that the exported draft may propose.
    vocabulary: int = 8192

    # Unrolled steps, conversations in a training step, and for each unrolled step how many predictions are learned from and their weight.
    steps: int = 3
    rows: int = 64
    predictions: tuple = (24576, 16384, 8192)
    weights: tuple = (1.0, 0.7, 0.5)
    # Predictions whose logits are in memory at a time.
    chunk: int = 8192
    # Share of the loss at temperature 1; the rest is at `sharp`.
    mix: float = 0.5
    sharp: float = 0.5

    # Rate of the matrices, their weight decay, steps of warm-up, and the share of the time over which the rate falls to zero.
    rate: float = 2e-3
    weight_decay: float = 0.05
    warm_up: int = 200
    decay: float = 0.75

    # Conversations that the starting weights are fitted to.
    fit_rows: int = 128
    # Seconds between evaluations, and seconds kept for the last ones.
    every: float = 60.0
    tail: float = 22.0

    def with_pairs(self, pairs):
        """These options, changed by texts `name=value`."""
        kinds = {field.name: getattr(self, field.name) for field in fields(self)}
        changes = {}
        for pair in pairs:
            name, _, value = pair.partition("=")
            if name not in kinds:
                raise SystemExit(f"no option {name}: there are {', '.join(kinds)}")
            old = kinds[name]
            if isinstance(old, tuple):
                changes[name] = tuple(type(old[0])(part) for part in value.split(","))
            else:
                changes[name] = type(old)(float(value))
        options = replace(self, **changes)
        if not len(options.predictions) == len(options.weights) == options.steps:
            raise SystemExit(f"predictions and weights need one entry for each of the {options.steps} steps")
        return options
