"""Turns the prompts into token ids, once, with the base's tokenizer.json; training then needs neither tokenizer nor network."""

import json
import random

from . import prompts
from .config import say

NUM_SEEDS = 24000
# Ends of which a turn that runs on may be closed.
SENTENCE_ENDS = (".", "?", "!", "\n", ":")


def prepare(tokenizer_file, out_file):
    """Writes a JSON object.

    seeds: [ids, turns] each, turns being how many <|im_end|> are missing before the seed's first token (a conversation's system
    turn, or that and the user's). held_out: prompts to measure on. sentence_ends: ids. turns: what opens a user's turn and an
    answer, after <|im_end|>. start_of_turn, end_of_turn, end_of_text: ids.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    rng = random.Random(0)
    seeds = [[encode(text), turns] for text, turns in (_seed(rng) for _ in range(NUM_SEEDS))]
    ends = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token]).rstrip(" \"')*")
        if text.endswith(SENTENCE_ENDS):
            ends.append(token)
    system = prompts.SYSTEM.format(prompts.DEFAULT_SYSTEM)
    data = {
        "seeds": seeds,
        "held_out": [encode(system + prompts.USER + question + prompts.ANSWER) for question in prompts.HELD_OUT],
        "sentence_ends": ends,
        "turns": {"user": encode("\n" + prompts.USER), "answer": encode(prompts.ANSWER)[1:]},
        "start_of_turn": tokenizer.token_to_id("<|im_start|>"),
        "end_of_turn": tokenizer.token_to_id("<|im_end|>"),
        "end_of_text": tokenizer.token_to_id("<|endoftext|>"),
    }
    with open(out_file, "w") as file:
        json.dump(data, file, separators=(",", ":"))
    say(f"{len(seeds)} seeds of up to {max(len(ids) for ids, _ in seeds)} tokens, {len(ends)} tokens that end a sentence")


def _seed(rng):
    """The opening of one conversation, as text, and the turns missing before it."""
    kind = rng.random()
    if kind < 0.04:
        return rng.choice(prompts.PLAIN), 2
    if kind < 0.08:
        # A conversation without a system turn.
        turn = rng.choice(prompts.OPENINGS) if rng.random() < 0.5 else _question(rng) + prompts.ANSWER
        return prompts.USER + turn, 1
    system = prompts.DEFAULT_SYSTEM if rng.random() < 0.92 else rng.choice(prompts.OTHER_SYSTEMS)
    opening = prompts.SYSTEM.format(system) + prompts.USER
    if kind < 0.38:
        return opening + _question(rng) + prompts.ANSWER, 0
    return opening + rng.choice(prompts.OPENINGS), 0


def _question(rng):
    """A template filled with topics that is none of the held-out questions."""
    held_out = {question.lower() for question in prompts.HELD_OUT}
    while True:
        template = rng.choice(prompts.TEMPLATES)
        question = template.format(*rng.sample(prompts.TOPICS, template.count("{}")))
        if question.lower() not in held_out:
            return question
