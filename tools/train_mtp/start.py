"""Where training starts: "guess what all layers but the last would make of the next token, then do the last one".

The draft's layer and norms are the base's last ones. eh_proj is the least-squares map from [enorm(embed(t[i+1])) ; hnorm(h[i])] to
the input of the base's last layer at i + 1.
"""

import torch

from .base import rms_norm
from .config import DEVICE, say


@torch.no_grad()
def start(draft, base, ids):
    """Sets the draft's weights; ids (rows, length): text of the base's to fit to."""
    shape, weights = base.shape, draft.weights
    hidden, kv = shape.hidden, shape.kv_heads * shape.head_dim
    last = base.layers[-1]
    copied = dict(zip("qkv", last.qkv.split((hidden, kv, kv))), o=last.o, down=last.down)
    copied |= dict(zip(("gate", "up"), last.gate_up.chunk(2)), input_norm=last.input_norm, post_norm=last.post_norm, norm=base.norm)
    for name, weight in copied.items():
        weights[name].copy_(weight.float())
    # Norm weights go into the matrices that follow them: the optimiser's steps are then of one size.
    for norm, matrices in (("input_norm", "qkv"), ("post_norm", ("gate", "up"))):
        for name in matrices:
            weights[name].mul_(weights[norm])
        weights[norm].fill_(1.0)

    gram = torch.zeros(2 * hidden, 2 * hidden, device=DEVICE)
    cross = torch.zeros(2 * hidden, hidden, device=DEVICE)
    squares = 0.0
    scales = []
    one = torch.ones(hidden, device=DEVICE)
    for part in ids.split(16):
        last_input, out = base.prefill(part)
        parts = rms_norm(base.embedding[part[:, 1:]], one, shape.eps), rms_norm(out[:, :-1], one, shape.eps)
        # The first tokens of a text have outlying states.
        given = torch.cat(parts, -1)[:, 2:].reshape(-1, 2 * hidden).float()
        wanted = last_input[:, 3:].reshape(-1, hidden).float()
        size = wanted.pow(2).mean(-1, keepdim=True).sqrt()
        scales.append(size.flatten())
        wanted = wanted / size
        gram += given.t() @ given
        cross += given.t() @ wanted
        squares += wanted.pow(2).sum()
    ridge = 1e-3 * gram.diagonal().mean() * torch.eye(2 * hidden, device=DEVICE)
    solution = torch.linalg.solve(gram + ridge, cross)
    weights["eh_proj"].copy_(solution.t())
    # eh_proj gives states of size one, so what the layer adds to them shrinks as much.
    scale = torch.cat(scales).median()
    weights["o"].div_(scale)
    weights["down"].div_(scale)
    error = squares - 2 * (solution * cross).sum() + (solution * (gram @ solution)).sum()
    say(f"start: the fit explains {1 - (error / squares).item():.4f} of the variance; states are of size {scale.item():.2f}")
