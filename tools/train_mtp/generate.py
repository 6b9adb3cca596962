"""The base writes conversations: many rows in lock step, one token of each per step, a step being one CUDA graph.

Of every token is kept what training needs, so that the base is run only once: its hidden state after the final norm, and the
likeliest tokens after it with their logits.
"""

import torch

from .base import rotary_table
from .config import CUDA, DEVICE, DTYPE
from .kernels import matmul_fp32

# Tokens past its length that a turn may still take to end its sentence.
GRACE = 48


def zeros(*size, dtype=torch.int64):
    return torch.zeros(*size, dtype=dtype, device=DEVICE)


def gumbel(*size):
    """Noise that makes an argmax a draw from a softmax."""
    return -torch.log(-torch.log(torch.rand(*size, device=DEVICE).clamp(1e-9, 1 - 1e-7)))


class Turns:
    """Whose turn it is in each row: what is forced, what ends, how warm it is sampled. All on the device, of fixed addresses."""

    def __init__(self, prompts, rows, vocab):
        self.end, self.end_of_text = prompts["end_of_turn"], prompts["end_of_text"]
        # Ends of turns so far: 0 is the system's turn, odd a user's, even an answer. Then the turn's length, and how many tokens of
        # the next turn's opening are still to come.
        self.count, self.length, self.queued = zeros(rows), zeros(rows), zeros(rows)
        self.answer_temperature, self.user_temperature = zeros(rows, dtype=torch.float32), zeros(rows, dtype=torch.float32)
        self.answer_limit, self.user_limit = zeros(rows), zeros(rows)
        self.ends_sentence = zeros(vocab, dtype=torch.bool)
        self.ends_sentence[torch.tensor(prompts["sentence_ends"], device=DEVICE)] = True
        # opening[is answer, tokens left]: read backwards.
        openings = [prompts["turns"]["user"], prompts["turns"]["answer"]]
        self.opening = zeros(2, max(map(len, openings)) + 1)
        for role, ids in enumerate(openings):
            self.opening[role, 1 : len(ids) + 1] = torch.tensor(ids[::-1], device=DEVICE)
        self.opening_length = torch.tensor([len(ids) for ids in openings], device=DEVICE)

    def reset(self, rows):
        for name in ("count", "answer_temperature", "user_temperature", "answer_limit", "user_limit"):
            getattr(self, name).copy_(torch.tensor([getattr(row, name) for row in rows]))
        self.length.zero_()
        self.queued.zero_()

    def is_answer(self):
        return (self.count >= 2) & (self.count % 2 == 0)

    def temperature(self):
        return torch.where(self.is_answer(), self.answer_temperature, self.user_temperature)

    def advance(self, token, drawn, forced):
        """The token after `token`: `forced` where that is not negative, else the turn's opening, its end, or what was drawn."""
        answer = self.is_answer()
        token_after = drawn.masked_fill(drawn == self.end_of_text, self.end)
        over = self.length - torch.where(answer, self.answer_limit, self.user_limit)
        # A turn that runs on is closed.
        token_after = token_after.masked_fill((over > 0) & (self.ends_sentence[token] | (over > GRACE)), self.end)
        token_after = torch.where(self.queued > 0, self.opening[answer.long(), self.queued], token_after)
        token_after = torch.where(forced >= 0, forced, token_after)
        ends = token_after == self.end
        self.count += ends
        self.queued.copy_(torch.where(ends, self.opening_length[self.is_answer().long()], (self.queued - 1).clamp(min=0)))
        self.length.copy_((self.length + 1).masked_fill(ends, 0))
        return token_after


class Writer:
    """Decodes `rows` conversations of `length` tokens. After `write`:

    ids (rows, length + 1) int64; hidden (rows, length, hidden): after the final norm, at each token; top_ids int32 and top_logits
    fp16 (rows, length, top): the likeliest tokens after it, unordered, their logits less the largest.
    """

    def __init__(self, base, prompts, rows, length, top):
        shape = base.shape
        self.base, self.rows, self.length, self.top = base, rows, length, top
        cache = (rows, shape.kv_heads, length, shape.head_dim)
        self.keys = [zeros(*cache, dtype=DTYPE) for _ in base.layers]
        self.values = [zeros(*cache, dtype=DTYPE) for _ in base.layers]
        self.cos, self.sin = rotary_table(shape, length)
        self.turns = Turns(prompts, rows, shape.vocab)
        self.time, self.token = zeros(1), zeros(rows)
        self.forced, self.ids = zeros(rows, length + 1), zeros(rows, length + 1)
        self.hidden = zeros(rows, length, shape.hidden, dtype=DTYPE)
        self.top_ids = zeros(rows, length, top, dtype=torch.int32)
        self.top_logits = zeros(rows, length, top, dtype=torch.float16)
        self.graph = None

    def _step(self):
        time = self.time
        hidden = self.base.decode(self.token, time, self.keys, self.values, self.cos, self.sin)
        logits, ids = matmul_fp32(hidden, self.base.embedding.t()).topk(self.top, sorted=False)
        self.hidden.index_copy_(1, time, hidden.unsqueeze(1))
        self.top_ids.index_copy_(1, time, ids.int().unsqueeze(1))
        self.top_logits.index_copy_(1, time, (logits - logits.amax(1, keepdim=True)).half().unsqueeze(1))
        temperature = self.turns.temperature()[:, None]
        warm = logits / temperature.clamp(min=1e-3) + gumbel(self.rows, self.top)
        choice = torch.where(temperature > 0, warm, logits).argmax(1, keepdim=True)
        drawn = ids.gather(1, choice)[:, 0]
        forced = self.forced.index_select(1, time + 1)[:, 0]
        token = self.turns.advance(self.token, drawn, forced)
        self.token.copy_(token)
        self.ids.index_copy_(1, time + 1, token[:, None])
        self.time += 1

    def _reset(self, rows):
        forced = torch.full((self.rows, self.length + 1), -1)
        for i, row in enumerate(rows):
            ids = row.ids[: self.length]
            forced[i, : len(ids)] = torch.tensor(ids)
        self.forced.copy_(forced)
        self.ids.copy_(forced)
        self.token.copy_(forced[:, 0])
        self.time.zero_()
        self.turns.reset(rows)

    def _capture(self):
        # Two steps beside the stream first, as CUDA graphs want: they compile the kernels and reserve the libraries' memory.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    @torch.no_grad()
    def write(self, rows):
        """rows: `corpus.Row`s, as many as the writer has."""
        self._reset(rows)
        if CUDA and self.graph is None:
            self._capture()
            self._reset(rows)
        step = self.graph.replay if self.graph else self._step
        for _ in range(self.length):
            step()
