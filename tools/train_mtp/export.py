"""The committed format: model.safetensors (bf16, d2t as int64) and config.json. Written and read without further packages."""

import json
import os

import numpy as np
import torch

from .draft import NAMES

KINDS = {"BF16": (np.int16, torch.bfloat16), "I64": (np.int64, torch.int64)}


def export(draft, folder, prompts, options, vocabulary=None):
    """Writes the draft; vocabulary: ids ascending that it may propose, as `d2t` (what to add to a draft token to get the base's)."""
    os.makedirs(folder, exist_ok=True)
    prefix = f"model.layers.{draft.shape.layers}."
    tensors = {}
    for name in sorted(NAMES, key=NAMES.get):
        tensors[f"{prefix}{NAMES[name]}.weight"] = draft.weights[name].detach().to("cpu", torch.bfloat16)
    if vocabulary is not None:
        tensors["d2t"] = (vocabulary - torch.arange(len(vocabulary), device=vocabulary.device)).cpu()
    write(os.path.join(folder, "model.safetensors"), tensors)
    with open(os.path.join(folder, "config.json"), "w") as file:
        file.write(json.dumps(config(draft.shape, prompts, options), indent=2) + "\n")


def load(draft, file):
    """Reads weights into the draft; returns the ids that it may propose, or None for all."""
    tensors = read(file)
    prefix = f"model.layers.{draft.shape.layers}."
    draft.restore({name: tensors[f"{prefix}{stored}.weight"].float() for name, stored in NAMES.items()})
    if "d2t" not in tensors:
        return None
    return (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).to(draft.weights["norm"].device)


def config(shape, prompts, options):
    return {
        "architectures": ["SmolLM2MTP"],
        "model_type": "smollm2_mtp",
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "base_num_hidden_layers": shape.layers,
        "num_hidden_layers": 1,
        "num_nextn_predict_layers": 1,
        "mtp_layer_index": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "embed_tokens_from_base": True,
        "lm_head_from_base": True,
        "bos_token_id": prompts["start_of_turn"],
        "eos_token_id": prompts["end_of_turn"],
        "torch_dtype": "bfloat16",
        "mtp": {
            "input": "eh_proj([enorm(embed(t[i+1])) ; hnorm(h[i])]), the embedding half first",
            "base_hidden": "h[i] is the base model's last hidden state after its final norm, at token i",
            "recurrent_hidden": "a deeper step takes the module's own output after shared_head.norm",
            "position": "the index of the consumed token, i+1",
            "predicts": "t[i+2]",
            "trained_steps": options.steps,
            "trained_context": options.length - options.steps - 1,
        },
    }


def write(path, tensors):
    """A safetensors file, at once or not at all."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        kind = next(kind for kind, (_, dtype) in KINDS.items() if dtype == tensor.dtype)
        raw = tensor.contiguous()
        raw = (raw.view(torch.int16) if kind == "BF16" else raw).numpy().tobytes()
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path + ".partial", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
    os.replace(path + ".partial", path)


def read(path):
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            stored, dtype = KINDS[entry["dtype"]]
            begin, end = entry["data_offsets"]
            values = torch.from_numpy(np.frombuffer(data[begin:end], stored).copy()).reshape(entry["shape"])
            tensors[name] = values.view(dtype) if entry["dtype"] == "BF16" else values
    return tensors
