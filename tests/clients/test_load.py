"""Many clients at once: the same text as alone, a cancel that frees what it held, and a long prompt beside a stream."""

import time
import unittest
import urllib.request

from . import server
from .test_grpc import CHAT, Stream

NUM_STREAMS = 64
SUBJECTS = ["rivers", "numbers like 3.14", "a for loop in Rust", "the moon 🌙", "bread", "北京", "tabs\tand spaces", "old ships"]

# What is aimed at. A busy machine gets room, and the figures are printed: single gaps of 240 ms were seen on an idle one.
STALL_SECONDS = 0.2
ROOM = 5


def prompt(i):
    return CHAT.format(f"Say {i % 9 + 1} short things about {SUBJECTS[i % len(SUBJECTS)]}, and end with {i}.")


class Load(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = server.shared()
        cls.address = cls.server.address("grpc")

    def blocks_used(self):
        with urllib.request.urlopen(f"http://{self.server.address('metrics')}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("drafthorse_kv_blocks_used{"))

    def one(self, i, parameters):
        stream = Stream(self.address)
        stream.send("one", prompt(i), stream=True, parameters=parameters)
        texts, finals, errors = stream.until_final("one")
        stream.close()
        self.assertEqual((finals["one"], errors), (1, {}))
        return texts["one"]

    def test_as_many_streams_as_fit_a_step_say_what_each_says_alone(self):
        # Greedy and seeded ones mixed, so that a step holds both.
        parameters = [{"temperature": i % 2 * 0.8, "seed": i, "max_tokens": 24} for i in range(NUM_STREAMS)]
        stream = Stream(self.address)
        ids = [str(i) for i in range(NUM_STREAMS)]
        for i in range(NUM_STREAMS):
            stream.send(ids[i], prompt(i), stream=True, parameters=parameters[i])
        texts, finals, errors = stream.until_final(*ids)
        stream.close()
        self.assertEqual(errors, {})
        self.assertEqual(set(finals.values()), {1})
        alone = {str(i): self.one(i, parameters[i]) for i in range(NUM_STREAMS)}
        self.assertEqual(texts, alone)
        self.assertGreater(len(set(alone.values())), NUM_STREAMS // 2)

    def test_a_cancel_frees_its_blocks(self):
        stream = Stream(self.address)
        for i in range(4):
            stream.send(str(i), prompt(i), stream=True, parameters={"max_tokens": 2000, "ignore_eos": True})
        stream.answers.get(timeout=60)
        self.assertGreater(self.blocks_used(), 0)
        start = time.monotonic()
        stream.close(cancel=True)
        while self.blocks_used() > 0:
            self.assertLess(time.monotonic() - start, STALL_SECONDS * ROOM)
        print(f"blocks of 4 cancelled streams free after {(time.monotonic() - start) * 1e3:.0f} ms ...", end=" ", flush=True)

    def test_a_long_prompt_does_not_stop_a_running_stream(self):
        stream, other = Stream(self.address), Stream(self.address)
        stream.send("running", prompt(0), stream=True, parameters={"max_tokens": 1000, "ignore_eos": True})
        for _ in range(8):
            stream.answers.get(timeout=60)
        # 4,000 tokens: a word and a number of three digits, each digit a token, are four or five.
        long = " ".join(f"word {i}" for i in range(100, 900))
        other.send("long", long, stream=True, parameters={"max_tokens": 1})
        gaps, last = [], time.monotonic()
        while other.answers.empty():
            stream.answers.get(timeout=60)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        result, error = other.answers.get()
        stream.close(cancel=True)
        other.close()
        self.assertIsNone(error)
        self.assertGreater(len(gaps), 8, "the prompt was not computed beside the stream")
        print(f"{len(gaps)} tokens beside it, the longest gap {max(gaps) * 1e3:.0f} ms ...", end=" ", flush=True)
        self.assertLess(max(gaps), STALL_SECONDS * ROOM)


if __name__ == "__main__":
    unittest.main()
