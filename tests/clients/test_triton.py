"""gRPC as tritonclient speaks it: the vLLM backend's tensors, alone, streamed, many at once, cancelled, wrong."""

import json
import queue
import threading
import time
import urllib.request

import numpy as np
import tritonclient.grpc as triton
from server import ServerTest

# Seconds that any one answer may take on a busy machine.
PATIENCE = 120


def tensor(name: str, value, dtype: str) -> triton.InferInput:
    made = triton.InferInput(name, [1], dtype)
    kind = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32}[dtype]
    made.set_data_from_numpy(np.array([value.encode() if isinstance(value, str) else value], dtype=kind))
    return made


def inputs(text: str, stream: bool = False, exclude_input: bool = True, **sampling) -> list[triton.InferInput]:
    return [
        tensor("text_input", text, "BYTES"),
        tensor("stream", stream, "BOOL"),
        tensor("exclude_input_in_output", exclude_input, "BOOL"),
        tensor("sampling_parameters", json.dumps({"temperature": 0, **sampling}), "BYTES"),
    ]


def text_of(result: triton.InferResult) -> str:
    return b"".join(result.as_numpy("text_output").reshape(-1)).decode()


def is_final(result: triton.InferResult) -> bool:
    return result.get_response().parameters["triton_final_response"].bool_param


class Stream:
    """One gRPC stream; what comes back, by request id."""

    def __init__(self, url: str):
        self.client = triton.InferenceServerClient(url)
        self.answers = queue.Queue()
        self.client.start_stream(callback=lambda result, error: self.answers.put((result, error)))

    def send(self, request_id: str, what: list[triton.InferInput], model: str = "llm") -> None:
        self.client.async_stream_infer(model, what, request_id=request_id, enable_empty_final_response=True)

    def next(self):
        return self.answers.get(timeout=PATIENCE)

    def collect(self, ids: set[str]) -> dict[str, list[triton.InferResult]]:
        """All responses of these requests, until each had its final one."""
        responses = {request_id: [] for request_id in ids}
        waiting = set(ids)
        while waiting:
            result, error = self.next()
            if error is not None:
                raise error
            request_id = result.get_response().id
            assert request_id in waiting, f"{request_id} goes on after its final response"
            responses[request_id].append(result)
            if is_final(result):
                waiting.remove(request_id)
        return responses

    def close(self, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


class TritonTest(ServerTest):
    def stream(self) -> Stream:
        opened = Stream(self.grpc_url)
        self.addCleanup(opened.close)
        return opened

    def one(self, text: str, **sampling) -> str:
        return text_of(self.client.infer("llm", inputs(text, **sampling), client_timeout=PATIENCE))

    def error(self, what: list[triton.InferInput], model: str = "llm", version: str = "") -> triton.InferenceServerException:
        with self.assertRaises(triton.InferenceServerException) as caught:
            self.client.infer(model, what, model_version=version, client_timeout=PATIENCE)
        return caught.exception

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.metrics_url, timeout=PATIENCE) as answer:
            lines = answer.read().decode().splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " "))]
        self.assertTrue(values, f"there is no metric {name}")
        return sum(values)

    def test_says_what_it_is(self):
        self.assertTrue(self.client.is_server_live())
        self.assertTrue(self.client.is_server_ready())
        self.assertEqual(self.client.get_server_metadata().name, "drafthorse")
        metadata = self.client.get_model_metadata("llm")
        self.assertIn("text_input", [each.name for each in metadata.inputs])
        self.assertIn("text_output", [each.name for each in metadata.outputs])
        config = self.client.get_model_config("llm").config
        self.assertTrue(config.model_transaction_policy.decoupled)
        index = {each.name: each for each in self.client.get_model_repository_index().models}
        self.assertEqual(index["llm"].state, "READY")

    def test_one_answer(self):
        self.assertIn("Paris", self.one("The capital of France is", max_tokens=8))
        whole = text_of(self.client.infer("llm", inputs("1, 2, 3,", exclude_input=False, max_tokens=4)))
        self.assertTrue(whole.startswith("1, 2, 3, 4"), whole)

    def test_a_stream_adds_up_to_the_one_answer(self):
        prompt = "Once upon a time"
        stream = self.stream()
        stream.send("a", inputs(prompt, stream=True, max_tokens=24))
        responses = stream.collect({"a"})["a"]
        self.assertEqual(sum(map(is_final, responses)), 1)
        self.assertGreater(len(responses), 4, "text comes as it is made")
        self.assertEqual("".join(map(text_of, responses)), self.one(prompt, max_tokens=24))

    def test_many_requests_on_one_stream_give_what_each_gives_alone(self):
        prompts = {str(i): f"{i} plus {i} is" for i in range(16)}
        stream = self.stream()
        for request_id, prompt in prompts.items():
            stream.send(request_id, inputs(prompt, stream=True, max_tokens=12))
        responses = stream.collect(set(prompts))
        for request_id, prompt in prompts.items():
            text = "".join(map(text_of, responses[request_id]))
            self.assertEqual(text, self.one(prompt, max_tokens=12), prompt)

    def test_outputs_on_request(self):
        asked = ["return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"]
        what = inputs("The sky is", max_tokens=5, ignore_eos=True) + [tensor(name, True, "BOOL") for name in asked]
        result = self.client.infer("llm", what, client_timeout=PATIENCE)
        self.assertEqual(result.as_numpy("finish_reason").reshape(-1)[0], b"length")
        self.assertEqual(result.as_numpy("num_input_tokens").reshape(-1)[0], 3)
        self.assertEqual(result.as_numpy("num_output_tokens").reshape(-1)[0], 5)

    def test_a_seed_gives_the_same_text_again(self):
        texts = [self.one("My favourite colour", temperature=1.0, seed=seed, max_tokens=16) for seed in (7, 7, 8)]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])

    def test_a_cancelled_stream_frees_its_blocks(self):
        stream = Stream(self.grpc_url)
        stream.send("long", inputs("Count to a thousand: 1, 2,", stream=True, max_tokens=4000, ignore_eos=True))
        for _ in range(5):
            _, error = stream.next()
            self.assertIsNone(error)
        stream.close(cancel=True)
        deadline = time.monotonic() + 10
        while self.metric("drafthorse_kv_blocks_used") > 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertEqual(self.metric("drafthorse_kv_blocks_used"), 0)

    def test_requests_from_many_threads(self):
        answers = {}

        def ask(i: int) -> None:
            client = triton.InferenceServerClient(self.grpc_url)
            answers[i] = text_of(client.infer("llm", inputs(f"Item {i}:", max_tokens=6), client_timeout=PATIENCE))
            client.close()

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual({i: self.one(f"Item {i}:", max_tokens=6) for i in range(12)}, answers)

    def test_bad_input_is_refused_by_name(self):
        good = inputs("Hello", max_tokens=4)
        without = lambda name: [each for each in good if each.name() != name]  # noqa: E731
        broken = without("sampling_parameters") + [tensor("sampling_parameters", '{"max_tokens": }', "BYTES")]
        cases = {
            "text_input missing": (without("text_input"), "text_input"),
            "text_input of numbers": (without("text_input") + [tensor("text_input", 7, "INT32")], "text_input"),
            "stream as text": (without("stream") + [tensor("stream", "yes", "BYTES")], "stream"),
            "broken JSON": (broken, "sampling_parameters"),
            "no tokens": (inputs("Hello", max_tokens=0), "max_tokens"),
            "negative temperature": (inputs("Hello", temperature=-1), "temperature"),
            "text as a temperature": (inputs("Hello", temperature="warm"), "temperature"),
            "a prompt over the context": (inputs("word " * 9000, max_tokens=4), "8192"),
        }
        for name, (what, must_name) in cases.items():
            with self.subTest(name):
                error = self.error(what)
                self.assertIn("INVALID_ARGUMENT", str(error.status()))
                self.assertIn(must_name, error.message())
        self.assertIn("NOT_FOUND", str(self.error(good, model="nobody").status()))
        self.assertIn("NOT_FOUND", str(self.error(good, version="9").status()))

    def test_a_bad_request_leaves_the_others_on_its_stream(self):
        stream = self.stream()
        stream.send("good", inputs("One, two,", stream=True, max_tokens=16))
        stream.send("bad", inputs("Hello", max_tokens=-5))
        stream.send("other", inputs("Hello"), model="nobody")
        texts, errors, open_requests = "", 0, 3
        while open_requests:
            result, error = stream.next()
            if error is not None:
                errors += 1
                open_requests -= 1
                continue
            self.assertEqual(result.get_response().id, "good")
            texts += text_of(result)
            open_requests -= is_final(result)
        self.assertEqual(errors, 2)
        self.assertEqual(texts, self.one("One, two,", max_tokens=16))
