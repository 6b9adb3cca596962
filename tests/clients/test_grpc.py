"""What users of tritonclient see over gRPC."""

import json
import queue
import time
import unittest
import urllib.request

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from . import server

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def inputs(prompt, stream=None, parameters=None, **flags):
    def text(name, value):
        tensor = triton.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([value.encode()], dtype=object))
        return tensor

    def boolean(name, value):
        tensor = triton.InferInput(name, [1], "BOOL")
        tensor.set_data_from_numpy(np.array([value]))
        return tensor

    tensors = [text("text_input", prompt)]
    if stream is not None:
        tensors.append(boolean("stream", stream))
    if parameters is not None:
        tensors.append(text("sampling_parameters", parameters if isinstance(parameters, str) else json.dumps(parameters)))
    return tensors + [boolean(name, value) for name, value in flags.items()]


def text_of(result):
    return result.as_numpy("text_output")[0].decode()


class Stream:
    """A bidirectional stream whose answers are kept by request id."""

    def __init__(self, address, **options):
        self.client = triton.InferenceServerClient(address)
        self.answers = queue.Queue()
        self.client.start_stream(callback=lambda result, error: self.answers.put((result, error)), **options)

    def send(self, request_id, *args, **kwargs):
        self.client.async_stream_infer("llm", inputs(*args, **kwargs), request_id=request_id)

    def until_final(self, *ids):
        """The text of each id, and how many finals it had; errors by id."""
        texts, finals, errors = {i: "" for i in ids}, {i: 0 for i in ids}, {}
        while any(finals[i] == 0 and i not in errors for i in ids):
            result, error = self.answers.get(timeout=60)
            if error is not None:
                errors[getattr(error, "request_id", None) or "?"] = error
                return texts, finals, errors
            response = result.get_response()
            if response.outputs:
                texts[response.id] += text_of(result)
            finals[response.id] += response.parameters["triton_final_response"].bool_param
        return texts, finals, errors

    def close(self, cancel=False):
        self.client.stop_stream(cancel_requests=cancel)


class Grpc(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = server.shared()
        cls.address = cls.server.address("grpc")
        cls.client = triton.InferenceServerClient(cls.address)

    def metric(self, name):
        with urllib.request.urlopen(f"http://{self.server.address('metrics')}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)]
        self.assertTrue(values, f"no metric {name}")
        return sum(values)

    def refused(self, code, *needles, model="llm", tensors=None, **kwargs):
        with self.assertRaises(InferenceServerException) as caught:
            self.client.infer(model, tensors if tensors is not None else inputs("Hi", **kwargs))
        self.assertEqual(caught.exception.status(), f"StatusCode.{code}", caught.exception.message())
        for needle in needles:
            self.assertIn(needle, caught.exception.message())

    def test_health_and_metadata(self):
        self.assertTrue(self.client.is_server_live())
        self.assertTrue(self.client.is_server_ready())
        self.assertTrue(self.client.is_model_ready("llm"))
        self.assertFalse(self.client.is_model_ready("nobody"))
        metadata = self.client.get_model_metadata("llm")
        self.assertIn("text_input", [tensor.name for tensor in metadata.inputs])
        self.assertEqual({t.name: t.datatype for t in metadata.outputs}["text_output"], "BYTES")
        self.assertTrue(self.client.get_model_config("llm").config.model_transaction_policy.decoupled)
        states = {model.name: model.state for model in self.client.get_model_repository_index().models}
        self.assertEqual(states["llm"], "READY")

    def test_unary_answers_the_whole_text(self):
        prompt = CHAT.format("What is the capital of France?")
        parameters = {"temperature": 0, "max_tokens": 32}
        result = self.client.infer(
            "llm",
            inputs(prompt, parameters=parameters, exclude_input_in_output=True, return_finish_reason=True,
                   return_num_input_tokens=True, return_num_output_tokens=True),
            request_id="one",
        )
        self.assertEqual(result.get_response().id, "one")
        self.assertIn("Paris", text_of(result))
        self.assertEqual(result.as_numpy("finish_reason")[0], b"stop")
        self.assertGreater(result.as_numpy("num_input_tokens")[0], 5)
        self.assertLess(result.as_numpy("num_output_tokens")[0], 32)
        # The vLLM backend's default when not streaming: the prompt comes first.
        whole = text_of(self.client.infer("llm", inputs(prompt, parameters=parameters)))
        self.assertEqual(whole, prompt + text_of(result))

    def test_log_probabilities_of_the_prompt_come_with_the_answer(self):
        result = self.client.infer(
            "llm",
            inputs("The capital of France is", parameters={"max_tokens": 2, "temperature": 0, "logprobs": 1, "prompt_logprobs": 1},
                   return_num_input_tokens=True, return_logprobs=True),
        )
        of_prompt = json.loads(result.as_numpy("prompt_logprobs")[0])
        self.assertEqual(len(of_prompt), result.as_numpy("num_input_tokens")[0])
        self.assertIsNone(of_prompt[0])
        answer = json.loads(result.as_numpy("logprobs")[0])
        self.assertEqual([min(token["rank"] for token in entry.values()) for entry in answer], [1, 1])
        for entry in of_prompt[1:] + answer:
            for token in entry.values():
                self.assertLess(token["logprob"], 0)
        self.refused("INVALID_ARGUMENT", "stop_token_ids[1]: must be a token id", parameters={"stop_token_ids": [1, "x"]})

    def test_stream_deltas_add_up_to_the_unary_text(self):
        prompt = CHAT.format("Count from 1 to 12, then write 你好 and an emoji.")
        parameters = {"temperature": 0.8, "seed": 7, "max_tokens": 48}
        want = text_of(self.client.infer("llm", inputs(prompt, parameters=parameters, exclude_input_in_output=True)))
        stream = Stream(self.address)
        stream.send("a", prompt, stream=True, parameters=parameters)
        texts, finals, errors = stream.until_final("a")
        stream.close()
        self.assertEqual((texts["a"], finals["a"], errors), (want, 1, {}))

    def test_many_requests_on_one_stream(self):
        prompts = {str(i): CHAT.format(f"Name {i + 2} animals.") for i in range(8)}
        parameters = {"temperature": 0, "max_tokens": 24}
        stream = Stream(self.address)
        for request_id, prompt in prompts.items():
            stream.send(request_id, prompt, stream=True, parameters=parameters)
        texts, finals, errors = stream.until_final(*prompts)
        stream.close()
        self.assertEqual(errors, {})
        for request_id, prompt in prompts.items():
            alone = self.client.infer("llm", inputs(prompt, parameters=parameters, exclude_input_in_output=True))
            self.assertEqual(texts[request_id], text_of(alone), "alone and in a batch the same")
            self.assertEqual(finals[request_id], 1)

    def test_a_bad_request_leaves_the_stream_alone(self):
        stream = Stream(self.address)
        stream.client.async_stream_infer("nobody", inputs("Hi", stream=True), request_id="bad")
        result, error = stream.answers.get(timeout=30)
        self.assertIsNone(result)
        self.assertIn("nobody", str(error))
        stream.send("good", "Hi", stream=True, parameters={"max_tokens": 4, "temperature": 0})
        texts, finals, errors = stream.until_final("good")
        stream.close()
        self.assertEqual((finals["good"], errors), (1, {}))

    def test_cancel_frees_the_request(self):
        cancelled = self.metric('nv_inference_request_failure{reason="CANCELED",model="llm",version="1"}')
        stream = Stream(self.address)
        stream.send("long", "Once upon a time", stream=True, parameters={"max_tokens": 4000, "ignore_eos": True})
        for _ in range(3):
            self.assertIsNone(stream.answers.get(timeout=60)[1])
        stream.close(cancel=True)
        deadline = time.monotonic() + 5
        while self.metric("vllm:num_requests_running") > 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertEqual(self.metric("vllm:num_requests_running"), 0)
        after = self.metric('nv_inference_request_failure{reason="CANCELED",model="llm",version="1"}')
        self.assertEqual(after, cancelled + 1)

    def test_sampling_parameters_may_be_strings(self):
        result = self.client.infer(
            "llm",
            inputs("Hello", parameters={"max_tokens": "3", "temperature": "0", "ignore_eos": True}, return_num_output_tokens=True),
        )
        self.assertEqual(result.as_numpy("num_output_tokens")[0], 3)

    def test_bad_values_are_named(self):
        self.refused("INVALID_ARGUMENT", "max_tokens", parameters={"max_tokens": -1})
        self.refused("INVALID_ARGUMENT", "max_tokens", parameters={"max_tokens": 0})
        self.refused("INVALID_ARGUMENT", "temperature", parameters={"temperature": -0.5})
        self.refused("INVALID_ARGUMENT", "temperature", parameters={"temperature": "nan"})
        self.refused("INVALID_ARGUMENT", "sampling_parameters", "line 1", parameters='{"temperature": NaN}')
        self.refused("INVALID_ARGUMENT", "top_p", parameters={"top_p": 1.5})
        self.refused("INVALID_ARGUMENT", "line 1", parameters="{")
        self.refused("INVALID_ARGUMENT", "stream", stream=True)
        self.refused("NOT_FOUND", "nobody", model="nobody")
        self.refused("INVALID_ARGUMENT", "text_input", tensors=inputs(""))
        self.refused("INVALID_ARGUMENT", "8192", tensors=inputs("word " * 9000))
        bad_type = triton.InferInput("text_input", [1], "INT32")
        bad_type.set_data_from_numpy(np.array([1], dtype=np.int32))
        self.refused("INVALID_ARGUMENT", "INT32", "BYTES", tensors=[bad_type])
        self.refused("INVALID_ARGUMENT", "text_input", tensors=inputs("Hi", stream=False)[1:])


if __name__ == "__main__":
    unittest.main()
