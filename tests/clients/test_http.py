"""What users of the OpenAI client, of tritonclient.http and of curl see."""

import json
import unittest
import urllib.error
import urllib.request

import numpy as np
import openai
import tritonclient.http as triton

from . import server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Http(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = server.shared()
        cls.url = f"http://{cls.server.address('http')}"
        cls.openai = openai.OpenAI(base_url=f"{cls.url}/v1", api_key="none", max_retries=0)

    def post(self, path, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def test_models_are_listed(self):
        self.assertIn("llm", [model.id for model in self.openai.models.list()])

    def test_chat_streamed_equals_chat_whole(self):
        options = dict(model="llm", messages=QUESTION, temperature=0, max_tokens=32)
        whole = self.openai.chat.completions.create(**options)
        self.assertIn("Paris", whole.choices[0].message.content)
        self.assertEqual(whole.choices[0].finish_reason, "stop")
        self.assertGreater(whole.usage.completion_tokens, 0)
        chunks = list(self.openai.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)

    def test_stop_strings_are_cut(self):
        options = dict(model="llm", messages=QUESTION, temperature=0, max_tokens=32)
        text = self.openai.chat.completions.create(**options, stop=["Paris"]).choices[0].message.content
        self.assertNotIn("Paris", text)
        self.assertIn("capital", text)

    def test_bad_requests_are_named(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.openai.chat.completions.create(model="llm", messages=QUESTION, temperature=-1)
        self.assertIn("temperature", str(caught.exception))
        with self.assertRaises(openai.NotFoundError):
            self.openai.chat.completions.create(model="nobody", messages=QUESTION)
        status, body = self.post("/v1/chat/completions", b'{"model": "llm", "messages": [')
        self.assertEqual(status, 400)
        self.assertIn("line 1", body)

    def test_generate_and_generate_stream(self):
        request = {"text_input": "The capital of France is", "max_tokens": 8, "temperature": 0}
        status, body = self.post("/v2/models/llm/generate", request)
        self.assertEqual(status, 200, body)
        text = json.loads(body)["text_output"]
        status, events = self.post("/v2/models/llm/generate_stream", {**request, "stream": True})
        self.assertEqual(status, 200, events)
        deltas = [json.loads(line[6:])["text_output"] for line in events.splitlines() if line.startswith("data: ")]
        self.assertTrue(text.endswith("".join(deltas)), (text, deltas))
        self.assertGreater(len(deltas), 1)

    def test_tritonclient_http(self):
        client = triton.InferenceServerClient(self.server.address("http"))
        self.assertTrue(client.is_server_ready())
        tensor = triton.InferInput("text_input", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([b"Hello"], dtype=object))
        result = client.infer("llm", [tensor])
        self.assertTrue(result.as_numpy("text_output")[0].startswith(b"Hello"))


if __name__ == "__main__":
    unittest.main()
