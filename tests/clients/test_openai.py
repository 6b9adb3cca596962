"""HTTP as the openai client and curl speak it."""

import json
import urllib.error
import urllib.request

import openai
from server import ServerTest

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


class OpenAITest(ServerTest):
    def setUp(self):
        self.openai = openai.OpenAI(base_url=f"{self.http_url}/v1", api_key="none", timeout=120, max_retries=0)
        self.addCleanup(self.openai.close)

    def post(self, path: str, body: dict | bytes):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.http_url + path, data, {"content-type": "application/json"})
        return urllib.request.urlopen(request, timeout=120)

    def test_names_its_models(self):
        self.assertEqual([model.id for model in self.openai.models.list()], ["llm"])

    def test_a_chat_streamed_is_the_chat_whole(self):
        ask = {"model": "llm", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
        whole = self.openai.chat.completions.create(**ask)
        self.assertIn("Paris", whole.choices[0].message.content)
        self.assertEqual(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens)
        chunks = list(self.openai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        self.assertEqual("".join(deltas), whole.choices[0].message.content)
        self.assertEqual(chunks[-1].usage, whole.usage)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        self.assertEqual([reason for reason in reasons if reason], [whole.choices[0].finish_reason])

    def test_what_is_wrong_is_named(self):
        with self.assertRaises(openai.NotFoundError):
            self.openai.chat.completions.create(model="nobody", messages=QUESTION)
        with self.assertRaises(openai.BadRequestError) as caught:
            self.openai.chat.completions.create(model="llm", messages=QUESTION, temperature=-1)
        self.assertIn("temperature", str(caught.exception))
        with self.assertRaises(urllib.error.HTTPError) as caught:
            self.post("/v1/chat/completions", b'{"model": "llm", "messages": [}')
        self.assertEqual(caught.exception.code, 400)

    def test_generate(self):
        body = {"text_input": "The capital of France is", "parameters": {"temperature": 0, "max_tokens": 8}}
        with self.post("/v2/models/llm/generate", body) as answer:
            self.assertIn("Paris", json.load(answer)["text_output"])
        body["parameters"]["stream"] = True
        with self.post("/v2/models/llm/generate_stream", body) as answer:
            events = [json.loads(line[5:]) for line in answer.read().decode().splitlines() if line.startswith("data:")]
        self.assertIn("Paris", "".join(event["text_output"] for event in events))
