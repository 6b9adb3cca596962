"""Plain speculative decoding, for checks: no caches, no masks, everything computed anew in each round."""

import torch

from .config import DEVICE


@torch.no_grad()
def speculate(draft, base, prompt, steps, new_tokens, end_of_turn, vocabulary=None):
    """Greedy: the tokens, and what each round accepted, until the end of the turn or `new_tokens`."""
    head = base.embedding if vocabulary is None else base.embedding[vocabulary]

    def best(out):
        tokens = (out @ base.embedding.t()).argmax(-1)
        return tokens.tolist()

    def guess(out):
        token = (out @ head.t()).argmax(-1)
        return (token if vocabulary is None else vocabulary[token]).item()

    ids = lambda tokens: torch.tensor([tokens], device=DEVICE)
    hidden = base.prefill(ids(prompt))[1]
    # The last token is not yet through the base; `hidden` is of all before it.
    text = prompt + best(hidden[0, -1:])
    rounds = []
    while len(text) < len(prompt) + new_tokens and end_of_turn not in text[len(prompt) :]:
        drafts, states = [], hidden
        for _ in range(steps):
            embedded = base.embedding[ids((text + drafts)[1:])]
            out = draft.forward(embedded, states, [], 1)[0][:, -1:]
            drafts.append(guess(out[0, -1]))
            states = torch.cat((states, out), 1)
        verified = base.prefill(ids(text + drafts))[1]
        expected = best(verified[0, len(text) - 1 :])
        count = 0
        while count < steps and drafts[count] == expected[count]:
            count += 1
        rounds.append(count)
        hidden = verified[:, : len(text) + count]
        text = text + expected[: count + 1]
    return text[len(prompt) :], rounds


def shares(rounds, steps):
    """Of the rounds, which share accepted at least 1, 2, .. drafts."""
    return [round(sum(count >= k for count in rounds) / max(len(rounds), 1), 4) for k in range(1, steps + 1)]
