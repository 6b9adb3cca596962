"""The sizes that all tiny models share, and what their rope scalings have in common."""

# Positions that a model whose rope is scaled was "trained" on: a third of the tokens of a case.
TRAINED = 32

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

STRETCH = {"factor": 4.0, "original_max_position_embeddings": TRAINED}
YARN = {"rope_type": "yarn", **STRETCH}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **STRETCH}
