"""The whole training at a tiny size, on a made-up base, with every part held against a plainer one. Ends with an error where one fails."""

import os
import random
import tempfile
from dataclasses import replace

import torch

from . import kernels
from .base import Base
from .config import CUDA, DEVICE, DTYPE, Options, Shape, say
from .corpus import write_corpus
from .draft import Draft
from .evaluate import accepted, measure, tables, walk
from .export import export, load
from .loss import HeadLoss
from .speculate import speculate
from .start import start
from .train import Trainer

SHAPE = Shape(
    hidden=96, intermediate=128, layers=3, heads=6, kv_heads=2, head_dim=16, vocab=512, context=256, rope_theta=1e4, eps=1e-5
)  # fmt: skip
OPTIONS = Options(
    batch=48, length=72, rounds=2, held_out=6, top=32, vocabulary=256, rows=16, predictions=(512, 256, 128), chunk=200, warm_up=10,
    fit_rows=32, rate=4e-3,
)  # fmt: skip
# Relative errors that the arithmetic in use allows: bf16 on a GPU, fp32 on a CPU.
CLOSE = 4e-2 if CUDA else 2e-5


def check(name, error, limit=CLOSE):
    say(f"{name}: {error:.2e}")
    if not error <= limit:
        raise SystemExit(f"{name}: {error} is above {limit}")


def distance(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def made_up_prompts():
    rng = random.Random(0)
    ids = lambda low, high: [rng.randrange(20, SHAPE.vocab) for _ in range(rng.randint(low, high))]
    user, answer = [5, 1, 6, 5], [5, 1, 7, 8, 5]
    return {
        "seeds": [[ids(1, 8), rng.choice((0, 1, 2))] for _ in range(200)],
        "held_out": [ids(3, 9) + [2] + user + ids(2, 4) + [2] + answer for _ in range(OPTIONS.held_out)],
        "sentence_ends": list(range(3, 20)),
        "turns": {"user": user, "answer": answer},
        "start_of_turn": 1,
        "end_of_turn": 2,
        "end_of_text": 0,
    }


def check_kernels():
    rows, slots, dim = 5, 200, SHAPE.head_dim
    random_of = lambda *size: torch.randn(*size, device=DEVICE, dtype=DTYPE)
    query = random_of(rows, SHAPE.heads, dim)
    keys, values = random_of(rows, SHAPE.kv_heads, slots, dim), random_of(rows, SHAPE.kv_heads, slots, dim)
    for time in (0, 63, 64, 130, 199):
        out = kernels.decode_attention(query, keys, values, torch.tensor([time], device=DEVICE))
        repeat = lambda x: x[:, :, : time + 1].float().repeat_interleave(SHAPE.heads // SHAPE.kv_heads, 1)
        score = (repeat(keys) @ query.float().unsqueeze(-1)).squeeze(-1) * dim**-0.5
        wanted = (score.softmax(-1).unsqueeze(2) @ repeat(values)).squeeze(2)
        check(f"attention over {time + 1} keys", distance(out, wanted))
    logits = 4 * random_of(30, 12288)
    wanted, wanted_sum = logits.float().softmax(-1), logits.float().logsumexp(-1)
    log_sum = kernels.softmax_in_place(logits)
    check("softmax", max(distance(logits, wanted), distance(log_sum, wanted_sum)))


def check_loss():
    rows = 300
    head = 0.3 * torch.randn(SHAPE.vocab, SHAPE.hidden, device=DEVICE, dtype=DTYPE)
    out = torch.randn(rows, SHAPE.hidden, device=DEVICE, dtype=DTYPE).requires_grad_()
    ids = torch.stack([torch.randperm(SHAPE.vocab, device=DEVICE)[:32] for _ in range(rows)])
    target = torch.rand(rows, 32, device=DEVICE).softmax(-1)
    loss, chance = HeadLoss.apply(out, head, ids, target, ids[:, 3], 128)
    (2 * loss).backward()
    plain = out.detach().float().requires_grad_()
    log_p = (plain @ head.float().t()).log_softmax(-1)
    plain_loss = -(log_p.gather(1, ids) * target).sum(1).mean()
    (2 * plain_loss).backward()
    check("loss", distance(loss.detach(), plain_loss.detach()))
    check("gradient of the loss", distance(out.grad, plain.grad))
    check("chance of the token that came", distance(chance, log_p.gather(1, ids[:, 3:4])[:, 0].exp().detach()))


@torch.no_grad()
def check_chain_mask(base):
    """Step 3 of the chain at i is a plain causal pass over: step 1 at 0..=i, then steps 2 and 3 at i."""
    draft = Draft(SHAPE)
    ids = torch.randint(0, SHAPE.vocab, (1, 24), device=DEVICE)
    hidden = torch.randn(1, 24, SHAPE.hidden, device=DEVICE, dtype=DTYPE)
    outs = [out for _, out in draft.unroll(base.embedding, hidden, ids, 3)]
    for i in (0, 9, 19):
        states = torch.cat((hidden[:, : i + 1], outs[0][:, i : i + 1], outs[1][:, i : i + 1]), 1)
        plain = draft.forward(base.embedding[ids[:, 1 : i + 4]], states, [], 1)[0]
        check(f"chain at {i}", distance(outs[2][0, i], plain[0, -1]))


def smoke():
    torch.manual_seed(0)
    if not CUDA:
        # So small products are slower on several threads.
        torch.set_num_threads(1)
    say(f"on {DEVICE}, kernels {'in Triton' if kernels.USE_TRITON else 'in PyTorch'}")
    check_kernels()
    check_loss()
    base, prompts, options = Base.random(SHAPE), made_up_prompts(), OPTIONS
    check_chain_mask(base)

    corpus, measured = write_corpus(base, prompts, options, float("inf"), 1)
    vocabulary, covered = corpus.likely_tokens(SHAPE.vocab, options.vocabulary)
    say(f"{len(vocabulary)} tokens cover {covered:.3f}")
    rows = torch.arange(options.rows, device=DEVICE)

    def loss_of(trainer):
        torch.manual_seed(5)
        return trainer.loss(rows)[1]

    draft = Draft(SHAPE)
    trainer = Trainer(draft, base, corpus, options)
    random_loss = loss_of(trainer)
    start(draft, base, corpus.ids[: options.fit_rows].long())
    say(f"losses {random_loss.tolist()} of random weights, {loss_of(trainer).tolist()} of the starting ones")
    check("first loss of the starting weights, against random ones", (loss_of(trainer)[0] / random_loss[0]).item(), 0.9)

    draft = Draft(SHAPE)
    trainer = Trainer(draft, base, corpus, options)
    before = loss_of(trainer)
    for _ in range(40):
        trainer.step(1.0)
    after = loss_of(trainer)
    say(f"losses {before.tolist()} of other random weights, {after.tolist()} after 40 steps")
    check("losses after training, against before", (after / before).max().item(), 0.9)

    with tempfile.TemporaryDirectory() as folder:
        # A training that went on from its saved state takes the same next step.
        torch.save(trainer.state(), os.path.join(folder, "state.pt"))
        other = Trainer(Draft(SHAPE), base, corpus, replace(options, rate=1.0))
        other.restore(torch.load(os.path.join(folder, "state.pt"), map_location=DEVICE, weights_only=True))
        for each in (trainer, other):
            torch.manual_seed(6)
            each.step(0.5)
        check("resumed", max(distance(other.draft.weights[n].detach(), w.detach()) for n, w in draft.weights.items()))

        export(draft, folder, prompts, options, vocabulary)
        read_back = Draft(SHAPE)
        d2t = load(read_back, os.path.join(folder, "model.safetensors"))
        check("exported weights", max(distance(w.detach(), draft.weights[n].detach()) for n, w in read_back.weights.items()), 4e-3)
        check("exported d2t", (d2t != vocabulary).float().mean().item(), 0)

    # The walk over chains, with masks, accepts what a plain decoder accepts. In bf16 near ties break it: shown, not checked.
    same = total = 0
    for row in range(options.held_out):
        for cut in (None, vocabulary):
            counts = accepted(read_back, base, measured[0.0], row, options.steps, 2, vocabulary=cut).tolist()
            walked = walk(counts)
            _, rounds = speculate(read_back, base, prompts["held_out"][row], options.steps, 64, 2, cut)
            same += walked == rounds[: len(walked)]
            total += 1
    say(f"{same} of {total} walks are those of plain speculative decoding")
    if same != total and not CUDA:
        raise SystemExit("the walk over chains is not what a decoder does")
    print(tables(measure(read_back, base, measured, options, 2, vocabulary)), flush=True)
    say("smoke passed")
