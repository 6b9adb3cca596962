"""Muon for matrices, Adam for norm weights.

Muon (Jordan, 2024) turns the momentum's singular values to about one by polynomials of x x^T. The five used here, one a step, were
published by You Jiacheng (2025) as optimal for so few steps. An update's size is that of Adam's: 0.2 sqrt(larger side), as in
"Muon is scalable for LLM training" (Liu et al., 2025).
"""

import torch

from .config import CUDA, DTYPE

POLYNOMIALS = (
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
)  # fmt: skip
# Adam's rate as a share of the matrices'.
NORM_RATE = 1 / 3


def orthogonalize(x):
    """x with its singular values near one; in the shape and type given."""
    wide = x.t() if x.shape[0] > x.shape[1] else x
    wide = wide / (wide.norm() + 1e-12)
    for a, b, c in POLYNOMIALS:
        square = wide @ wide.t()
        wide = torch.addmm(wide, torch.addmm(square, square, square, beta=b, alpha=c), wide, beta=a)
    return wide.t() if x.shape[0] > x.shape[1] else wide


class Optimiser:
    def __init__(self, weights, rate, weight_decay):
        self.rate, self.weight_decay = rate, weight_decay
        self.matrices = [weight for weight in weights.values() if weight.ndim == 2]
        self.momenta = [torch.zeros_like(matrix) for matrix in self.matrices]
        norms = [weight for weight in weights.values() if weight.ndim == 1]
        self.adam = torch.optim.AdamW(norms, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=CUDA)

    @torch.no_grad()
    def step(self, share, momentum):
        """One step at `share` of the rate; gradients are dropped."""
        rate = self.rate * share
        for group in self.adam.param_groups:
            group["lr"] = rate * NORM_RATE
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for matrix, mean in zip(self.matrices, self.momenta):
            mean.lerp_(matrix.grad, 1 - momentum)
            update = orthogonalize(matrix.grad.lerp(mean, momentum).to(DTYPE)).to(matrix.dtype)
            matrix.mul_(1 - rate * self.weight_decay).add_(update, alpha=-rate * 0.2 * max(matrix.shape) ** 0.5)
            matrix.grad = None

    def state(self):
        return {"momenta": self.momenta, "adam": self.adam.state_dict(), "rate": self.rate}

    def restore(self, state):
        self.rate = state["rate"]
        for mean, saved in zip(self.momenta, state["momenta"]):
            mean.copy_(saved)
        self.adam.load_state_dict(state["adam"])
