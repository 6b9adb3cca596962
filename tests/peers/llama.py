"""How quick llama.cpp is with the sample model on this machine, for the bench's table.

    python3 -m venv target/peers
    CMAKE_ARGS=-DGGML_NATIVE=ON target/peers/bin/pip install llama-cpp-python==0.3.36      # builds for about 10 minutes
    target/peers/bin/python tests/peers/llama.py target/fetch/SmolLM2-135M-Instruct.Q4_1.gguf

Prints tokens per second as JSON: prefill of 512 tokens at once, and decode of one sequence that follows them. Medians of
several runs after one to warm up; run it on an otherwise idle machine.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

PREFILL_TOKENS = 512
DECODE_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    try:
        import llama_cpp
    except ModuleNotFoundError:
        sys.exit("llama-cpp-python is not installed: see the head of this file")
    if not args.gguf.is_file():
        sys.exit(f"no {args.gguf}: `make model` fetches it")

    model = llama_cpp.Llama(
        str(args.gguf),
        n_ctx=PREFILL_TOKENS + DECODE_TOKENS + 8,
        n_batch=PREFILL_TOKENS,
        n_ubatch=PREFILL_TOKENS,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        n_gpu_layers=0,
        verbose=False,
    )
    # Any tokens cost the same. Not the special ones, which are the first.
    draw = random.Random(1)
    prompt = [draw.randrange(100, model.n_vocab()) for _ in range(PREFILL_TOKENS)]

    def one_run() -> tuple[float, float]:
        model.reset()
        start = time.perf_counter()
        model.eval(prompt)
        prefilled = time.perf_counter()
        for token in prompt[:DECODE_TOKENS]:
            model.eval([token])
        done = time.perf_counter()
        return PREFILL_TOKENS / (prefilled - start), DECODE_TOKENS / (done - prefilled)

    one_run()
    prefill, decode = zip(*(one_run() for _ in range(args.runs)))
    result = {
        "peer": f"llama-cpp-python {llama_cpp.__version__}",
        "model": args.gguf.name,
        "threads": args.threads,
        "runs": args.runs,
        "prefill_512_tokens_per_second": round(statistics.median(prefill), 1),
        "decode_batch_1_tokens_per_second": round(statistics.median(decode), 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
