"""Two hundred prompts, greedy and seeded, with each way to draft and with none: every answer must be the same text.

    make build model venv && .venv/bin/python -m tests.clients.drafts [--prompts 200] [--tokens 48] [--together 16]

Prints how many answers were equal, and for each way how many tokens a step gave. Takes minutes; `make test` leaves it out.
"""

import argparse
import json
import pathlib
import tempfile
import threading

import tritonclient.grpc as triton

from . import server
from .test_grpc import CHAT, inputs, text_of

METHODS = ("none", "ngram", "mtp")

TOPICS = ("the tides", "bread", "a lighthouse", "prime numbers", "the bicycle", "rust on iron", "a library at night", "volcanoes",
          "the number 1234567", "chess", "rain in Lisbon", "glass", "bees", "the Silk Road", "a violin", "写诗", "emoji 🙂🚲",
          "tabs\tand\nlines", "an old map", "the moon")
FORMS = (
    "Tell me about {}.",
    "Write three short sentences on {}.",
    "List five facts about {} as a numbered list.",
    "Explain {} to a child.",
    "Write a Python function whose docstring mentions {}.",
    "Repeat exactly, then continue: {0}, and {0}, and {0}, and {0}",
    "Translate into French: I like {}.",
    "Write JSON with the keys name and text about {}.",
    "Is {} older than the wheel? Answer with yes or no, then why.",
    "{0} {0} {0} {0}",
)


def repository(folder, method):
    """The sample repository with another way to draft: its settings stand in config.pbtxt, which wins over flags."""
    source = server.ROOT / "model_repository"
    model = pathlib.Path(folder) / "llm"
    model.mkdir()
    (model / "1").symlink_to(source / "llm" / "1")
    (pathlib.Path(folder) / "mtp").symlink_to(source / "mtp")
    settings = {"speculate_method": method, "speculate_max_draft_token_num": "3", "draft_model_quant_type": "weight_only_int8",
                # Else drafts are given up where they do not pay, as they seldom do with so many requests at once.
                "speculate_adaptive": "false"}
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in settings.items()]
    (model / "config.pbtxt").write_text('name: "llm"\nbackend: "drafthorse"\n' + "\n".join(lines) + "\n")
    return folder


def answers(method, prompts, tokens, together):
    """Texts in order of the prompts, and how many tokens a verified step gave."""
    with tempfile.TemporaryDirectory() as folder:
        running = server.Server(repository=repository(folder, method))
        try:
            client = triton.InferenceServerClient(running.address("grpc"))
            running.wait_until_ready(lambda: client.is_model_ready("llm"))
            texts, counts, slots = [None] * len(prompts), [0, 0], threading.Semaphore(together)
            done = threading.Event()

            def take(place, result, error):
                if error is not None:
                    raise error
                texts[place] = text_of(result)
                drafts, accepted = (int(result.as_numpy(f"total_{name}tokens")[0]) for name in ("draft_", "accepted_draft_"))
                counts[0] += int(result.as_numpy("num_output_tokens")[0])
                counts[1] += accepted
                slots.release()
                if None not in texts:
                    done.set()

            for place, prompt in enumerate(prompts):
                parameters = {"max_tokens": tokens, "temperature": 0}
                if place % 4 == 3:
                    parameters = {"max_tokens": tokens, "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": place}
                slots.acquire()
                tensors = inputs(CHAT.format(prompt), parameters=json.dumps(parameters), exclude_input_in_output=True,
                                 return_acceptance=True, return_num_output_tokens=True)
                client.async_infer("llm", tensors, callback=lambda result, error, place=place: take(place, result, error))
            if not done.wait(600):
                raise RuntimeError(f"{method}: {texts.count(None)} answers did not come")
            return texts, counts[0] / (counts[0] - counts[1])
        finally:
            running.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--together", type=int, default=16)
    args = parser.parse_args()
    prompts = [form.format(topic) for form in FORMS for topic in TOPICS][: args.prompts]
    want, different = None, 0
    for method in METHODS:
        texts, per_step = answers(method, prompts, args.tokens, args.together)
        want = want or texts
        unequal = [place for place, text in enumerate(texts) if text != want[place]]
        different += len(unequal)
        print(f"{method}: {len(texts) - len(unequal)} of {len(texts)} answers are those without drafts; {per_step:.2f} tokens a step",
              flush=True)
        for place in unequal[:3]:
            print(f"  {prompts[place]!r}: {texts[place]!r} for {want[place]!r}")
    raise SystemExit(different > 0)


if __name__ == "__main__":
    main()
