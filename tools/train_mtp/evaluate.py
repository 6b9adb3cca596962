"""What a draft accepts, in one pass per answer: all chains at once, and a walk over them as a decoder would go."""

import torch

from .config import DEVICE
from .kernels import matmul_fp32
from .speculate import shares

# Tokens of an answer that are looked at.
ANSWER = 192


@torch.no_grad()
def accepted(draft, base, held, row, steps, end_of_turn, limit=ANSWER, vocabulary=None):
    """For each chain in answer `row` the number of greedy drafts that equal the base's tokens: (chains,), empty if the answer is short.

    vocabulary: ids that the draft may propose, all if None.
    """
    head = base.embedding if vocabulary is None else base.embedding[vocabulary]
    outputs = _chains(draft, base, held, row, steps, end_of_turn, limit)
    alive, count = None, torch.zeros(0, dtype=torch.int64, device=DEVICE)
    for _, out, ids, _ in outputs:
        best = matmul_fp32(out, head.t()).argmax(-1)
        best = best if vocabulary is None else vocabulary[best]
        alive = best == ids if alive is None else alive & (best == ids)
        count = alive.long() if len(count) == 0 else count + alive
    return count


def walk(counts):
    """What each round of a decoder accepts, going from chain to chain: the base's own token ends each round."""
    rounds, at = [], 0
    while at < len(counts):
        rounds.append(counts[at])
        at += counts[at] + 1
    return rounds


@torch.no_grad()
def greedy(draft, base, held, options, end_of_turn, prompts=None, limit=ANSWER, vocabulary=None):
    """Shares of answer positions at which the first k drafts hold (accept_prefix), the same of a decoder's rounds, and tokens per step, over the first `prompts`."""
    totals = torch.zeros(options.steps, dtype=torch.float64)
    positions, rounds = 0, []
    for row in range(min(prompts or len(held.ids), len(held.ids))):
        counts = accepted(draft, base, held, row, options.steps, end_of_turn, limit, vocabulary).tolist()
        for k in range(options.steps):
            totals[k] += sum(count > k for count in counts)
        positions += len(counts)
        rounds += walk(counts)
    prefix = (totals / max(positions, 1)).tolist()
    tokens = (sum(rounds) + len(rounds)) / max(len(rounds), 1)
    return {
        "accept_prefix": [round(x, 4) for x in prefix],
        "tokens_per_step": round(tokens, 3),
        "positions": positions,
        "rounds": len(rounds),
        "rounds_accepted": shares(rounds, options.steps),
    }


@torch.no_grad()
def sampled(draft, base, held, options, end_of_turn, temperature):
    """Mean of sum(min(p, q)): the chance that a sampled draft is accepted, given that those before it were."""
    totals = torch.zeros(options.steps, dtype=torch.float64, device=DEVICE)
    positions = 0
    for row in range(len(held.ids)):
        for step, out, _, hidden in _chains(draft, base, held, row, options.steps, end_of_turn, ANSWER):
            p, q = ((matmul_fp32(x, base.embedding.t()) / temperature).softmax(-1) for x in (hidden, out))
            totals[step - 1] += torch.minimum(p, q).sum()
            positions += len(out) if step == 1 else 0
    return {"temperature": temperature, "overlap": [round(x, 4) for x in (totals / max(positions, 1)).tolist()], "positions": positions}


@torch.no_grad()
def _chains(draft, base, held, row, steps, end_of_turn, limit):
    """Per step: (step, draft's outputs, the tokens that came, the base's hidden states they came from), for all chains of an answer."""
    ids, prompt = held.ids[row : row + 1].long(), held.prompt_lengths[row]
    ends = (ids[0, prompt:] == end_of_turn).nonzero().flatten().tolist()
    last = min([ids.shape[1] - 1, prompt + limit - 1] + [prompt + end for end in ends[:1]])
    first, past = prompt - 1, last - steps
    if past <= first:
        return
    ids, hidden = ids[:, : last + 1], held.hidden[row : row + 1, : last + 1]
    for step, out in draft.unroll(base.embedding, hidden, ids, steps):
        at = slice(first + step, past + step)
        yield step, out[0, first:past], ids[0, first + step + 1 : past + step + 1], hidden[0, at]


def measure(draft, base, measured, options, end_of_turn, vocabulary):
    """All figures of the README."""
    held = measured[0.0]
    args = (draft, base, held, options, end_of_turn)
    return {
        "first half": greedy(*args, prompts=len(held.ids) // 2),
        "all": greedy(*args),
        "all, whole answers": greedy(*args, limit=10**6),
        "all, cut vocabulary": greedy(*args, vocabulary=vocabulary),
        "sampled": [sampled(draft, base, measured[t], options, end_of_turn, t) for t in measured if t > 0],
    }


def tables(result):
    """`measure`'s figures as the README's tables."""
    greedy_rows = {name: row for name, row in result.items() if name != "sampled"}
    steps = range(1, len(next(iter(greedy_rows.values()))["accept_prefix"]) + 1)
    heads = " | ".join(f"k={k}" for k in steps)
    lines = [f"| greedy | positions | {heads} | tokens per step |", "| --- " * (len(steps) + 3) + "|"]
    for name, row in greedy_rows.items():
        shares = " | ".join(f"{x:.3f}" for x in row["accept_prefix"])
        lines.append(f"| {name} | {row['positions']:,} | {shares} | {row['tokens_per_step']:.2f} |")
    lines += ["", f"| temperature | positions | {heads} |", "| --- " * (len(steps) + 2) + "|"]
    for row in result["sampled"]:
        lines.append(f"| {row['temperature']} | {row['positions']:,} | " + " | ".join(f"{x:.3f}" for x in row["overlap"]) + " |")
    return "\n".join(lines)
