"""What the draft learns from, and what it is measured on: conversations of the base's own."""

import gc
import random
import time
from dataclasses import dataclass

import torch

from .config import CUDA, DEVICE, DTYPE, START, say
from .generate import Writer
from .kernels import matmul_fp32

# Temperatures at which the held-out prompts are answered.
MEASURED = (0.0, 0.7, 1.0)
# Temperatures of answers and how often they are taken: most use is greedy or cool.
ANSWERS = ((0.0, 0.5), (0.3, 0.12), (0.5, 0.12), (0.7, 0.14), (1.0, 0.12))
NO_LIMIT = 10**6


@dataclass
class Row:
    """One conversation to be written: its first tokens, the turns ended before them, how warm, and after how many tokens a turn is closed."""

    ids: list
    count: int
    answer_temperature: float
    user_temperature: float = 1.0
    answer_limit: int = NO_LIMIT
    user_limit: int = NO_LIMIT


@dataclass
class HeldOut:
    """Answers to the held-out prompts at one temperature: ids (prompts, length), hidden (prompts, length, hidden), prompt lengths."""

    ids: torch.Tensor
    hidden: torch.Tensor
    prompt_lengths: list


class Corpus:
    """Conversations of `length` tokens. ids int32, turn int8 (ends of turns before a token), hidden, top_ids, top_logits as `Writer` has them."""

    def __init__(self, rows, length, hidden, top):
        empty = lambda *size, dtype: torch.empty(rows, length, *size, dtype=dtype, device=DEVICE)
        self.ids, self.turn = empty(dtype=torch.int32), empty(dtype=torch.int8)
        self.hidden = empty(hidden, dtype=DTYPE)
        self.top_ids, self.top_logits = empty(top, dtype=torch.int32), empty(top, dtype=torch.float16)
        self.count = 0

    def __len__(self):
        return self.count

    def add(self, writer, turn, keep):
        """Takes over the rows `keep` (indices) of what was written."""
        rows = slice(self.count, self.count + len(keep))
        self.ids[rows] = writer.ids[keep, :-1].int()
        self.turn[rows] = turn[keep].clamp(max=100).to(torch.int8)
        for name in ("hidden", "top_ids", "top_logits"):
            getattr(self, name)[rows] = getattr(writer, name)[keep]
        self.count += len(keep)

    def close(self):
        for name in ("ids", "turn", "hidden", "top_ids", "top_logits"):
            setattr(self, name, getattr(self, name)[: self.count])

    def likely_tokens(self, vocab, size):
        """The `size` tokens to which the base gives most probability over all turns, and the share of it they take: ids ascending."""
        mass = torch.zeros(vocab, dtype=torch.float64, device=DEVICE)
        for i in range(0, self.count, 256):
            part = slice(i, i + 256)
            spoken = self.turn[part] >= 1
            probability = self.top_logits[part][spoken].float().softmax(-1).double()
            mass.index_add_(0, self.top_ids[part][spoken].long().flatten(), probability.flatten())
        tokens = mass.topk(min(size, vocab)).indices
        return tokens.sort().values, (mass[tokens].sum() / mass.sum()).item()


def turns(ids, count, end_of_turn):
    """For each token the ends of turns before it, with `count` (rows,) missing ones: 0 system, odd user, even answer."""
    ends = (ids == end_of_turn).long()
    return ends.cumsum(1) - ends + count[:, None]


def draw_rows(rng, prompts, number):
    rows = []
    temperatures, shares = zip(*ANSWERS)
    for _ in range(number):
        ids, count = rng.choice(prompts["seeds"])
        rows.append(
            Row(ids, count, rng.choices(temperatures, shares)[0], rng.choice((0.8, 1.0)), rng.randint(120, 380), rng.randint(16, 72))
        )
    return rows


def write_corpus(base, prompts, options, until, seed):
    """-> Corpus, {temperature: HeldOut}. No round begins that would not end by `until` (seconds on the clock)."""
    length, batch = options.length, options.batch
    held = prompts["held_out"][: options.held_out]
    if batch < len(held) * len(MEASURED):
        raise SystemExit(f"batch {batch} is too small for {len(held)} held-out prompts at {len(MEASURED)} temperatures")
    writer = Writer(base, prompts, batch, length, options.top)
    corpus = Corpus(options.rounds * batch, length, base.shape.hidden, options.top)
    rng = random.Random(seed)
    measured = {}
    begin = time.time()
    for number in range(options.rounds):
        rows = draw_rows(rng, prompts, batch)
        if number == 0:
            # The answers to the held-out prompts are the first rows of the first round.
            first = [Row(ids, 0, temperature) for temperature in MEASURED for ids in held]
            rows[: len(first)] = first
        writer.write(rows)
        ids = writer.ids[:, :-1]
        if number == 0:
            measured = _held_out(writer, held)
            _compare_with_prefill(base, ids[:4], writer.hidden[:4])
        count = torch.tensor([row.count for row in rows], device=DEVICE)
        corpus.add(writer, turns(ids, count, prompts["end_of_turn"]), _unknown(ids, held))
        now = time.time()
        say(f"round {number}: {len(corpus)} rows, {len(corpus) * length} tokens, {now - begin:.1f} s")
        if now + (now - begin) / (number + 1) > until:
            break
    corpus.close()
    del writer
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
    answers = ((corpus.turn >= 2) & (corpus.turn % 2 == 0)).float().mean().item()
    say(f"{answers:.3f} of the tokens are answers; generation ended {time.time() - START:.1f} s after the start")
    return corpus, measured


def answer_held_out(base, prompts, number, tokens):
    """{temperature: HeldOut} of the first `number` held-out prompts alone, with answers of up to `tokens`."""
    held = prompts["held_out"][:number]
    length = max(map(len, held)) + tokens
    writer = Writer(base, prompts, len(held) * len(MEASURED), length, 64)
    writer.write([Row(ids, 0, temperature) for temperature in MEASURED for ids in held])
    return _held_out(writer, held)


def _held_out(writer, held):
    """The first rows that were written."""
    measured = {}
    for i, temperature in enumerate(MEASURED):
        part = slice(i * len(held), (i + 1) * len(held))
        measured[temperature] = HeldOut(writer.ids[part, :-1].clone(), writer.hidden[part].clone(), [len(x) for x in held])
    return measured


def _unknown(ids, held):
    """Indices of rows that begin with none of the held-out prompts."""
    keep = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    for prompt in held:
        keep &= ~(ids[:, : len(prompt)] == torch.tensor(prompt, device=ids.device)).all(1)
    return keep.nonzero()[:, 0]


def _compare_with_prefill(base, ids, hidden):
    """What was decoded token by token must be what one pass over the whole gives; returns the relative error."""
    expected = base.prefill(ids)[1].float()
    error = ((expected - hidden.float()).norm() / expected.norm()).item()
    best = lambda h: matmul_fp32(h.reshape(-1, h.shape[-1]).to(DTYPE), base.embedding.t()).argmax(-1)
    same = (best(expected) == best(hidden)).float().mean().item()
    say(f"decoded against prefilled: relative error {error:.2e}, the same likeliest token at {same:.4f} of the positions")
    if error > 0.15:
        raise SystemExit("decoding and prefill disagree")
