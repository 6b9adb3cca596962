"""Cross entropy over the full vocabulary without its logits in memory: a chunk of rows at a time, whose gradient is made at once."""

import torch

from .kernels import softmax_in_place


class HeadLoss(torch.autograd.Function):
    """Mean over rows of the cross entropy of softmax(out @ head^T) against a sparse target.

    out (n, hidden), head (vocab, hidden), ids and target (n, top): likely tokens and their probabilities, token (n,): the one that
    came. -> the loss, and each row's probability of `token` (n,), which has no gradient.
    """

    @staticmethod
    def forward(ctx, out, head, ids, target, token, chunk):
        rows = out.shape[0]
        gradient = torch.empty_like(out)
        loss = torch.zeros((), device=out.device)
        chance = torch.empty(rows, device=out.device)
        for begin in range(0, rows, chunk):
            part = slice(begin, min(begin + chunk, rows))
            logits = out[part] @ head.t()
            wanted = logits.gather(1, ids[part]).float()
            came = logits.gather(1, token[part, None]).float()[:, 0]
            log_sum = softmax_in_place(logits)
            loss += ((log_sum[:, None] - wanted) * target[part]).sum()
            chance[part] = (came - log_sum).exp()
            # The logits' gradient is softmax - target, and the target is zero nearly everywhere.
            logits.scatter_(1, ids[part], ((wanted - log_sum[:, None]).exp() - target[part]).to(logits.dtype))
            torch.mm(logits, head, out=gradient[part])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(chance)
        return loss / rows, chance

    @staticmethod
    def backward(ctx, gradient_of_loss, _):
        (gradient,) = ctx.saved_tensors
        return gradient * (gradient_of_loss / len(gradient)).to(gradient.dtype), None, None, None, None, None
