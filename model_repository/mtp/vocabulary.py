"""Chooses the tokens that the draft may propose: those that the base itself writes most.

    python3 model_repository/mtp/vocabulary.py localhost:8000 model_repository/mtp/1/model.safetensors

The base, served as `llm`, writes chats from nothing but its system prompt and from short openings, at temperature 0.8 to 1. At
each position the probabilities of its 20 likeliest tokens are added up; the first 8192 tokens by that sum, and the special tokens
that end a turn, become `d2t` of the draft's checkpoint (what to add to a draft token to get the base's, as EAGLE-3 stores it).
No other text is read. Needs numpy.
"""

import json
import math
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np

NUM_TOKENS = 8192
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n"
# The end of a text, of a turn, its start; whatever else the counts say.
ALWAYS = [0, 1, 2]

ASKS = [
    "What is {}?", "Explain {} to a child.", "Write a short story about {}.", "List five facts about {}.",
    "Write a Python function that deals with {}.", "How do I learn about {}?", "Write a poem about {}.",
    "Compare {} with something similar.", "What are the advantages of {}?", "Summarize the history of {}.",
]
TOPICS = [
    "the sea", "fractions", "bread", "electric cars", "the Roman Empire", "sorting a list", "sleep", "volcanoes", "chess",
    "a job interview", "photosynthesis", "budgeting", "the moon", "prime numbers", "gardening", "music theory", "databases",
    "bicycles", "vaccines", "a friendly dog", "climate change", "good writing", "earthquakes", "trees", "parsing text",
    "the human heart", "trade", "paintings", "trains", "winter", "algebra", "cooking rice", "a lost key", "democracy",
    "neural networks", "whales", "a birthday", "probability", "glaciers", "honesty", "soap", "coffee", "public speaking",
    "rivers", "a small village", "gravity", "tea", "birds", "string reversal", "the stock market",
]


def generate(address, job):
    """Token probabilities of what the base writes after a prompt: a list of {token: probability}."""
    prompt, temperature, seed, max_tokens = job
    parameters = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens, "logprobs": 20}
    body = {
        "text_input": prompt,
        "exclude_input_in_output": True,
        "return_logprobs": True,
        "sampling_parameters": json.dumps(parameters),
    }
    request = urllib.request.Request(f"http://{address}/v2/models/llm/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=600) as answer:
        logprobs = json.loads(answer.read())["logprobs"]
    logprobs = logprobs[0] if isinstance(logprobs, list) and isinstance(logprobs[0], str) else logprobs
    entries = json.loads(logprobs) if isinstance(logprobs, str) else logprobs
    return [{int(token): math.exp(entry["logprob"]) for token, entry in position.items()} for position in entries]


def jobs():
    temperatures = [0.8, 0.9, 1.0]
    for seed in range(160):
        # The user's turn too is the base's own; it goes on past its end with the answer, or a new topic.
        yield SYSTEM, temperatures[seed % 3], seed, 220
    for seed, (topic, ask) in enumerate(product(TOPICS, ASKS)):
        if seed % 3 == 0:
            prompt = SYSTEM + ask.format(topic) + "<|im_end|>\n<|im_start|>assistant\n"
            yield prompt, temperatures[seed % 3], seed, 220


def main(address, path):
    mass = np.zeros(49152)
    written = 0
    with ThreadPoolExecutor(48) as pool:
        for done, positions in enumerate(pool.map(lambda job: generate(address, job), list(jobs()))):
            for probabilities in positions:
                for token, probability in probabilities.items():
                    mass[token] += probability
            written += len(positions)
            if done % 20 == 0:
                print(f"{done} texts, {written} tokens", flush=True)
    mass[ALWAYS] = np.inf
    tokens = np.sort(np.argsort(-mass, kind="stable")[:NUM_TOKENS])
    finite = mass[np.isfinite(mass)]
    covered = mass[tokens][np.isfinite(mass[tokens])].sum() / finite.sum()
    print(f"{written} tokens; {(mass > 0).sum()} different ones, of which {NUM_TOKENS} take {covered:.4f} of the probability")
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        data = file.read()
    differences = (tokens - np.arange(NUM_TOKENS)).astype("<i8").tobytes()
    metadata = header.pop("__metadata__", {})
    header.pop("d2t", None)
    end = max(entry["data_offsets"][1] for entry in header.values())
    header["d2t"] = {"dtype": "I64", "shape": [NUM_TOKENS], "data_offsets": [end, end + len(differences)]}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data[:end] + differences)


if __name__ == "__main__":
    main(*sys.argv[1:])
