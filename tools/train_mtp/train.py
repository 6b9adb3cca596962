"""Training within a budget of seconds: write text, start, step, evaluate, save. A training may be cut into parts, one command each."""

import json
import math
import os
import time

import torch

from .config import DEVICE, START, say
from .corpus import write_corpus
from .draft import Draft
from .evaluate import greedy, measure, tables
from .export import export, load
from .loss import HeadLoss
from .optimiser import Optimiser
from .start import start

# How likely a token is to be learned from, by who says it: the base's answers are what will be drafted.
ANSWER, USER, SYSTEM = 1.0, 0.1, 1e-4


def pick(log_weight, number):
    """Indices of `number` rows, drawn without return in proportion to their weight."""
    noise = -torch.log(-torch.log(torch.rand_like(log_weight).clamp(1e-9, 1 - 1e-7)))
    return (log_weight + noise).topk(min(number, len(log_weight)), sorted=False).indices


class Trainer:
    """One step at a time; `losses` is a running mean per unrolled step, (steps,) or None at the beginning."""

    def __init__(self, draft, base, corpus, options):
        self.draft, self.base, self.corpus, self.options = draft, base, corpus, options
        self.optimiser = Optimiser(draft.weights, options.rate, options.weight_decay)
        self.num_steps, self.losses = 0, None
        turn = corpus.turn.long()
        weight = torch.where(turn % 2 == 0, torch.where(turn >= 2, ANSWER, SYSTEM), USER)
        self.log_weight = weight.log().half()

    def loss(self, rows):
        """Over conversations `rows`: the sum to descend, and each unrolled step's own loss (steps,)."""
        corpus, options = self.corpus, self.options
        ids, hidden = corpus.ids[rows].long(), corpus.hidden[rows]
        batch, length = ids.shape
        chains = length - options.steps - 1
        top_ids = corpus.top_ids[rows].view(batch * length, -1)
        top_logits = corpus.top_logits[rows].view(batch * length, -1)
        flat_ids = ids.view(-1)
        # A chain's first guess is the token two after its start.
        chosen = pick(self.log_weight[rows][:, 2 : 2 + chains].reshape(-1).float(), options.predictions[0])
        alive, total, losses = None, 0, []
        for step, out in self.draft.unroll(self.base.embedding, hidden, ids, options.steps):
            if step > 1:
                # Deeper guesses count only where those before them held.
                kept = pick((alive + 0.05).log(), options.predictions[step - 1])
                chosen, alive = chosen[kept], alive[kept]
            at = chosen // chains * length + chosen % chains + step
            logits = top_logits[at].float()
            target = options.mix * logits.softmax(-1) + (1 - options.mix) * (logits / options.sharp).softmax(-1)
            picked = out.reshape(-1, out.shape[-1]).index_select(0, chosen)
            args = (picked, self.base.embedding, top_ids[at].long(), target, flat_ids[at + 1], options.chunk)
            loss, chance = HeadLoss.apply(*args)
            alive = chance if alive is None else alive * chance
            total = total + options.weights[step - 1] * loss
            losses.append(loss.detach())
        return total, torch.stack(losses)

    def step(self, share):
        """One step at `share` of the rate."""
        self.num_steps += 1
        rows = torch.randint(0, len(self.corpus), (self.options.rows,), device=DEVICE)
        total, losses = self.loss(rows)
        total.backward()
        self.losses = losses if self.losses is None else self.losses.lerp(losses, 0.02)
        warm = min(1.0, self.num_steps / self.options.warm_up)
        self.optimiser.step(share * warm, min(0.95, 0.85 + 0.1 * self.num_steps / 300))

    def state(self):
        return {"weights": self.draft.state(), "optimiser": self.optimiser.state(), "num_steps": self.num_steps}

    def restore(self, state):
        self.draft.restore(state["weights"])
        self.optimiser.restore(state["optimiser"])
        self.num_steps = state["num_steps"]


def share_of_rate(done, decay):
    """`done` of the training, 0 to 1, is behind: the rate falls to zero over the last `decay` of it."""
    return max(0.0, min(1.0, (1 - done) / decay))


def run(base, prompts, folder, seconds, part, parts, options):
    """Part `part` (from 1) of `parts`: all of it in `seconds` since the program began. Part 2 and later go on from `folder`/state.pt."""
    os.makedirs(folder, exist_ok=True)
    state_file = os.path.join(folder, "state.pt")
    state = None
    if part > 1:
        state = torch.load(state_file, map_location=DEVICE, weights_only=True)
        if state["part"] != part - 1:
            raise SystemExit(f"{state_file} is of part {state['part']}: part {state['part'] + 1} comes next, not {part}")
    # Every part writes a text of its own.
    torch.manual_seed(part)
    corpus, measured = write_corpus(base, prompts, options, START + seconds * options.generate, part)
    vocabulary, covered = corpus.likely_tokens(base.shape.vocab, options.vocabulary)
    say(f"the {len(vocabulary)} likeliest tokens take {covered:.4f} of the probability")
    end_of_turn = prompts["end_of_turn"]
    draft = Draft(base.shape)
    trainer = Trainer(draft, base, corpus, options)
    if state:
        trainer.restore(state)
    else:
        start(draft, base, corpus.ids[: options.fit_rows].long())

    def report(tag):
        figures = greedy(draft, base, measured[0.0], options, end_of_turn, prompts=options.held_out // 2)
        say(json.dumps({"after": tag, **figures}))

    report(trainer.num_steps)
    save = lambda: export(draft, folder, prompts, options, vocabulary)
    _loop(trainer, START + seconds - options.tail, (part - 1, parts), report, save)
    save()
    torch.save({**trainer.state(), "part": part}, state_file)
    say(f"saved after {trainer.num_steps} steps")
    # What is measured is what was written, rounded to bf16.
    load(draft, os.path.join(folder, "model.safetensors"))
    result = measure(draft, base, measured, options, end_of_turn, vocabulary)
    losses = [] if trainer.losses is None else trainer.losses.tolist()
    result_file = {"steps": trainer.num_steps, "text": corpus.ids.numel(), "covered": round(covered, 4), "losses": losses}
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump(result_file | {"figures": result}, file, indent=1)
    say(json.dumps(result_file))
    print(tables(result), flush=True)
    return result


def _loop(trainer, until, place, report, save):
    """Steps until `until`; place: the parts done before, and all parts."""
    options, (before, parts) = trainer.options, place
    begin = last = time.time()
    first = trainer.num_steps
    good = trainer.draft.state()
    while (now := time.time()) < until:
        done = (before + (now - begin) / (until - begin)) / parts
        trainer.step(share_of_rate(done, options.decay))
        taken = trainer.num_steps - first
        if taken in (1, 10, 50, 100, 200) or taken % 500 == 0:
            losses = trainer.losses.tolist()
            each = (time.time() - begin) / taken * 1e3
            say(f"step {trainer.num_steps}: losses {[round(x, 4) for x in losses]}, {each:.1f} ms a step, {done:.3f} done")
            if not all(math.isfinite(x) for x in losses):
                say("diverged: back to the last good weights, at half the rate")
                rate = trainer.optimiser.rate / 2
                trainer.draft.restore(good)
                trainer.optimiser = Optimiser(trainer.draft.weights, rate, options.weight_decay)
                trainer.losses = None
        if time.time() - last > options.every and trainer.losses is not None and trainer.losses.isfinite().all():
            last = time.time()
            report(trainer.num_steps)
            save()
            good = trainer.draft.state()
