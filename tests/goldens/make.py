"""Makes the goldens of this folder with transformers, in float32 on a CPU.

    python3 -m venv goldens && goldens/bin/pip install -r tests/goldens/requirements.txt
    goldens/bin/python tests/goldens/make.py tiny
    goldens/bin/python tests/goldens/make.py families
    goldens/bin/python tests/goldens/make.py chat
    goldens/bin/python tests/goldens/make.py fp8
    goldens/bin/python tests/goldens/make.py drafts
    goldens/bin/python tests/goldens/make.py sample target/fetch/SmolLM2-135M-Instruct.Q4_1.gguf

`families` and `chat` are in the files of these names. `tiny` writes tiny.safetensors, random weights that all tiny models share, and one
NAME.safetensors a case: its tokens, its logits, and its config.json in the metadata. `drafts` writes drafts/mtp.safetensors, a random MTP module
for the tied tiny model, what goes in, and what comes out, and what deepseek_mtp.py and eagle.py have. `sample` writes sample.json, what the sample model says to ten prompts, and
quality.json, texts that it wrote, to compare quantizations on.
"""

import argparse
import json
import tempfile
from pathlib import Path

import chat
import deepseek_mtp
import eagle
import families
import numpy as np
import safetensors
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tiny import LLAMA3, TINY, TRAINED, YARN
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig

HERE = Path(__file__).parent
VERSIONS = {
    "made_by": "tests/goldens/make.py",
    "torch": torch.__version__.split("+")[0],
    "transformers": transformers.__version__,
    "safetensors": safetensors.__version__,
}

# Tokens of a tiny case: three times the context that its stretched positions were "trained" on.
TINY_TOKENS = 96

# What each case changes.
CASES = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
    "norm_eps": {"rms_norm_eps": 0.1},
    "rope_theta": {"rope_theta": 200.0},
    "rope_linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "rope_dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": TRAINED},
    "rope_llama3": {"rope_scaling": LLAMA3},
    "rope_yarn": {"rope_scaling": YARN},
    "rope_yarn_betas": {"rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 0.25, "attention_factor": 0.8}},
}


def tiny_weights() -> dict[str, torch.Tensor]:
    """Wide enough that attention is far from uniform: scores have a standard deviation near 3."""
    torch.manual_seed(17)
    config = LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)
    weights = AutoModelForCausalLM.from_config(config).state_dict()
    for name, weight in weights.items():
        if "norm" in name:
            weights[name] = 1 + 0.2 * torch.randn_like(weight)
        elif name.endswith("bias"):
            weights[name] = 0.3 * torch.randn_like(weight)
        else:
            weights[name] = (1.0 if "embed" in name else 0.2) * torch.randn_like(weight)
    return weights


def tiny_case(config: dict, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The logits of all positions, `[tokens, vocab]`."""
    with tempfile.TemporaryDirectory() as folder:
        # Read from a file, as a reader of config.json would: keys are renamed on the way.
        (Path(folder) / "config.json").write_text(json.dumps(config))
        read = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(read, attn_implementation="eager").eval().to(torch.float32)
    wanted = {name for name in model.state_dict() if not (config["tie_word_embeddings"] and name == "lm_head.weight")}
    missing, surplus = model.load_state_dict({n: w for n, w in weights.items() if n in wanted}, strict=False)
    assert not surplus and set(missing) <= {"lm_head.weight"}, (missing, surplus)
    if config["tie_word_embeddings"]:
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        if (config.get("rope_scaling") or {}).get("rope_type") != "dynamic":
            return model(tokens[None]).logits[0]
        # One by one: the base at a token is that of a sequence that ends there.
        cache, rows = DynamicCache(config=model.config), []
        for position, token in enumerate(tokens):
            ids, positions = token.reshape(1, 1), torch.tensor([[position]])
            rows.append(model(ids, position_ids=positions, past_key_values=cache, use_cache=True).logits[0, -1])
        return torch.stack(rows)


def make_tiny() -> None:
    weights = tiny_weights()
    save_file(weights, HERE / "tiny.safetensors", VERSIONS)
    tokens = torch.randint(0, TINY["vocab_size"], (TINY_TOKENS,))
    for name, changes in CASES.items():
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **TINY, **changes}
        logits = tiny_case(config, weights, tokens)
        assert logits.isfinite().all() and logits.dtype == torch.float32
        metadata = {**VERSIONS, "config": json.dumps(config)}
        save_file({"tokens": tokens.to(torch.int32), "logits": logits.contiguous()}, HERE / f"{name}.safetensors", metadata)
        print(f"{name:18} logits {tuple(logits.shape)}, standard deviation {logits.std():.2f}")


def make_fp8() -> None:
    """quant/fp8.safetensors: weights in e4m3, scales of blocks of 128 x 128, and their products by torch."""
    torch.manual_seed(31)
    tensors = {}
    for name, (rows, columns) in {"whole": (256, 256), "ragged": (140, 150), "small": (40, 96)}.items():
        # All codes that are numbers, as often as each other.
        codes = torch.randint(0, 254, (rows, columns))
        codes = torch.where(codes < 127, codes, codes + 1).to(torch.uint8)
        weight = codes.view(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 128), -(-columns // 128)) * 1e-3 + 1e-5
        spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        parts = {"weight": weight, "weight_scale_inv": scales, "dequantized": weight.float() * spread}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    (HERE / "quant").mkdir(exist_ok=True)
    save_file(tensors, HERE / "quant" / "fp8.safetensors", VERSIONS)


DRAFT_TOKENS, DRAFT_STEPS = 40, 3
AT = "model.layers.2."


class Mtp:
    """An MTP module written out, in float64: a pair of token t[i + 1] and hidden state h[i] at position i + 1, one Llama layer."""

    def __init__(self, weights: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
        self.weights = {name.removeprefix(AT): weight.double() for name, weight in weights.items()}
        self.embedding = embedding.double()
        self.keys, self.values = [], []

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.weights[f"{name}.weight"] @ x

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + TINY["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def heads(self, x: torch.Tensor, count: int) -> torch.Tensor:
        return x.reshape(count, -1)

    def turn(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = position * TINY["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        first, second = x[:, :half], x[:, half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1)

    def step(self, token: int, hidden: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Its own hidden state, and logits. Keys and values stay."""
        pair = torch.cat([self.norm("enorm", self.embedding[token]), self.norm("hnorm", hidden)])
        x = self.linear("eh_proj", pair)
        y = self.norm("input_layernorm", x)
        queries, groups = TINY["num_attention_heads"], TINY["num_key_value_heads"]
        q = self.turn(self.heads(self.linear("self_attn.q_proj", y), queries), position)
        self.keys.append(self.turn(self.heads(self.linear("self_attn.k_proj", y), groups), position))
        self.values.append(self.heads(self.linear("self_attn.v_proj", y), groups))
        of_query = torch.arange(queries) // (queries // groups)
        keys, values = torch.stack(self.keys)[:, of_query], torch.stack(self.values)[:, of_query]
        scores = torch.einsum("hd,phd->hp", q, keys) / q.shape[-1] ** 0.5
        x = x + self.linear("self_attn.o_proj", torch.einsum("hp,phd->hd", scores.softmax(-1), values).flatten())
        y = self.norm("post_attention_layernorm", x)
        gate = torch.nn.functional.silu(self.linear("mlp.gate_proj", y))
        x = x + self.linear("mlp.down_proj", gate * self.linear("mlp.up_proj", y))
        out = self.norm("shared_head.norm", x)
        return out, self.embedding @ out


def make_drafts() -> None:
    tiny = tiny_weights()
    torch.manual_seed(23)
    width = TINY["hidden_size"]
    weights = {}
    for name, weight in tiny.items():
        if name.startswith("model.layers.0.") and not name.endswith("bias"):
            weights[AT + name.removeprefix("model.layers.0.")] = weight + 0.05 * torch.randn_like(weight)
    for name in ["enorm", "hnorm", "shared_head.norm"]:
        weights[f"{AT}{name}.weight"] = 1 + 0.2 * torch.randn(width)
    weights[f"{AT}eh_proj.weight"] = 0.15 * torch.randn(width, 2 * width)
    tokens = torch.randint(0, TINY["vocab_size"], (DRAFT_TOKENS,))
    hidden = torch.randn(DRAFT_TOKENS, width)
    module = Mtp(weights, tiny["model.embed_tokens.weight"])
    # Pair i is token i + 1 and the hidden state before it.
    pairs = zip(tokens[1:].tolist(), hidden[:-1].double())
    outs = [module.step(token, before, position) for position, (token, before) in enumerate(pairs, 1)]
    logits = torch.stack([logits for _, logits in outs])
    # Then on by itself, from its own likeliest token and its own hidden state.
    out, drafts, chain = outs[-1][0], [], []
    for depth in range(DRAFT_STEPS):
        drafts.append(int((chain or [logits[-1]])[-1].argmax()))
        out, chained = module.step(drafts[-1], out, DRAFT_TOKENS + depth)
        chain.append(chained)
    tensors = {**weights, "tokens": tokens.to(torch.int32), "hidden": hidden, "drafts": torch.tensor(drafts, dtype=torch.int32)}
    tensors |= {"logits": logits.float(), "chain": torch.stack(chain).float()}
    (HERE / "drafts").mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, HERE / "drafts" / "mtp.safetensors", VERSIONS)
    print(f"mtp logits {tuple(logits.shape)}, standard deviation {logits.std():.2f}, drafts {drafts}")
    tensors, metadata = deepseek_mtp.golden()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, HERE / "drafts" / "deepseek.safetensors", VERSIONS | metadata)
    for name, (tensors, metadata) in eagle.goldens().items():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, HERE / "drafts" / f"{name}.safetensors", VERSIONS | metadata)


# Ten prompts: chat and plain text; digits, tabs, emoji, Chinese, code.
PROMPTS = [
    {"chat": "What is the capital of France, and which river runs through it?"},
    {"chat": "Add 1234 and 5678, then multiply by 12."},
    {"chat": "Write a Python function that reverses a linked list."},
    {"chat": "用中文介绍一下北京。"},
    {"chat": "What do these mean? 😀 🚀 👩‍👩‍👧 ❤️"},
    {"text": "The three laws of motion are:\n1."},
    {"text": "name\tage\tcity\nAda\t36\tLondon\nAlan\t41\tWilmslow\nGrace\t85\t"},
    {"text": "fn main() {\n    let mut total = 0u64;\n    for i in 0..100 {\n"},
    {"text": "In 1969, on July 20 at 20:17 UTC, the lunar module"},
    {"text": "Dear Ms. Müller,\n\nthank you for your letter of 3 März; as we discussed, the café's naïve façade"},
]
NUM_GREEDY = 64

# Beginnings of the texts for quality.json: 8 of 257 tokens give 2048 positions.
OPENINGS = [
    "Photosynthesis is the process by which",
    "Once upon a time in a small village by the sea,",
    "def quicksort(items):\n",
    "To make a good vegetable soup, first",
    "The history of the Roman Empire begins",
    "Dear diary,\n\nToday I",
    "A database index is a data structure that",
    "<|im_start|>user\nExplain gravity to a child.<|im_end|>\n<|im_start|>assistant\n",
]
QUALITY_TOKENS = 257
OPENING_TOKENS = 4


class Sample:
    """The sample model with its weights dequantized to float32, and a tokenizer built from the file by smollm's own rule."""

    def __init__(self, path: Path):
        import gguf

        file = gguf.GGUFReader(path)
        self.key = lambda name: file.fields[name].contents()
        self.tokenizer = self.build_tokenizer()
        self.template = transformers.utils.chat_template_utils._compile_jinja_template(self.key("tokenizer.chat_template"))
        heads, kv_heads = self.key("llama.attention.head_count"), self.key("llama.attention.head_count_kv")
        config = LlamaConfig(
            vocab_size=self.key("llama.vocab_size"),
            hidden_size=self.key("llama.embedding_length"),
            intermediate_size=self.key("llama.feed_forward_length"),
            num_hidden_layers=self.key("llama.block_count"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=self.key("llama.context_length"),
            rms_norm_eps=1e-5,
            rope_theta=self.key("llama.rope.freq_base"),
            tie_word_embeddings=True,
        )
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(torch.float32)
        weights = {}
        for tensor in file.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            name, rotary_heads = self.hf_name(tensor.name, heads, kv_heads)
            if rotary_heads:
                rows, columns = values.shape
                values = values.reshape(rotary_heads, rows // rotary_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
            weights[name] = torch.from_numpy(np.ascontiguousarray(values))
        missing, surplus = self.model.load_state_dict(weights, strict=False)
        assert not surplus and missing == ["lm_head.weight"], (missing, surplus)
        self.model.tie_weights()

    @staticmethod
    def hf_name(name: str, heads: int, kv_heads: int) -> tuple[str, int]:
        """The name in a Hugging Face checkpoint, and the heads whose rows are interleaved, if any."""
        if not name.startswith("blk."):
            return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name], 0
        _, layer, part, _ = name.split(".")
        module = {
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        }[part]
        return f"model.layers.{layer}.{module}.weight", {"attn_q": heads, "attn_k": kv_heads}.get(part, 0)

    def build_tokenizer(self) -> tokenizers.Tokenizer:
        from tokenizers import AddedToken, models, pre_tokenizers

        assert self.key("tokenizer.ggml.pre") == "smollm"
        tokens = self.key("tokenizer.ggml.tokens")
        merges = [tuple(pair.split(" ")) for pair in self.key("tokenizer.ggml.merges")]
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        kinds = self.key("tokenizer.ggml.token_type")
        special = [AddedToken(token, normalized=False, special=True) for token, kind in zip(tokens, kinds) if kind == 3]
        tokenizer.add_special_tokens(special)
        return tokenizer

    def prompt(self, prompt: dict) -> str:
        if "text" in prompt:
            return prompt["text"]
        messages = [{"role": "user", "content": prompt["chat"]}]
        return self.template.render(messages=messages, add_generation_prompt=True)

    @torch.no_grad()
    def run(self, ids: list[int], cache: DynamicCache) -> torch.Tensor:
        """Log-probabilities after the last of `ids`."""
        logits = self.model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
        return torch.log_softmax(logits.double(), -1)

    def greedy(self, prompt: dict) -> dict:
        text = self.prompt(prompt)
        ids = self.tokenizer.encode(text).ids
        cache = DynamicCache(config=self.model.config)
        logprobs = self.run(ids, cache)
        top = logprobs.topk(5)
        answer, margins = [], []
        while len(answer) < NUM_GREEDY:
            best = logprobs.topk(2)
            answer.append(best.indices[0].item())
            margins.append(round((best.values[0] - best.values[1]).item(), 4))
            if answer[-1] == self.key("tokenizer.ggml.eos_token_id"):
                break
            logprobs = self.run(answer[-1:], cache)
        return {
            "prompt": text,
            "prompt_ids": ids,
            "top_ids": top.indices.tolist(),
            "top_logprobs": [round(value, 6) for value in top.values.tolist()],
            "greedy_text": self.tokenizer.decode(answer, skip_special_tokens=True),
            "greedy_ids": answer,
            "greedy_margins": margins,
        }

    @torch.no_grad()
    def write_on(self, openings: list[str]) -> list[list[int]]:
        """Texts sampled at temperature 1, so that a model's doubts are in them too; all begin with as many tokens."""
        generator = torch.Generator().manual_seed(0)
        texts = torch.tensor([self.tokenizer.encode(opening).ids[:OPENING_TOKENS] for opening in openings])
        cache, new = DynamicCache(config=self.model.config), texts
        while texts.shape[1] < QUALITY_TOKENS:
            logits = self.model(new, past_key_values=cache, use_cache=True).logits[:, -1]
            new = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            texts = torch.cat([texts, new], dim=1)
        return texts.tolist()


def make_sample(path: Path) -> None:
    sample = Sample(path)
    about = {**VERSIONS, "tokenizers": tokenizers.__version__, "model": path.name}
    prompts = [sample.greedy(prompt) for prompt in PROMPTS]
    write_lines(HERE / "sample.json", {**about, "prompts": prompts})
    for prompt in prompts:
        print(json.dumps(prompt["greedy_text"][:100], ensure_ascii=False))
    write_lines(HERE / "quality.json", {**about, "texts": sample.write_on(OPENINGS)})


def write_lines(path: Path, value: dict) -> None:
    """JSON with a line for each entry of the list at its end."""
    *about, (name, entries) = value.items()
    lines = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    head = "".join(f"{json.dumps(key)}: {json.dumps(text)},\n" for key, text in about)
    path.write_text(f"{{\n{head}{json.dumps(name)}: [\n  {lines}\n]\n}}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("tiny")
    kinds.add_parser("families").add_argument("names", nargs="*", help="all, if none are given")
    kinds.add_parser("chat")
    kinds.add_parser("drafts")
    kinds.add_parser("fp8")
    kinds.add_parser("sample").add_argument("gguf", type=Path)
    args = parser.parse_args()
    match args.kind:
        case "tiny":
            make_tiny()
        case "families":
            families.make(HERE, VERSIONS, args.names)
        case "chat":
            chat.make(HERE, VERSIONS, write_lines)
        case "drafts":
            make_drafts()
        case "fp8":
            make_fp8()
        case _:
            make_sample(args.gguf)


if __name__ == "__main__":
    main()
