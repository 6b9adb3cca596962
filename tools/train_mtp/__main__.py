"""python3 -m tools.train_mtp COMMAND, see README.md."""

import argparse
import json

from .config import Options, say


def main():
    parser = argparse.ArgumentParser(prog="train_mtp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="turn the prompts into token ids, once")
    prepare.add_argument("tokenizer", help="the base's tokenizer.json")
    prepare.add_argument("prompts", help="the JSON file to write")
    commands.add_parser("smoke", help="everything at a tiny size on a made-up base, checked")
    run = commands.add_parser("run", help="train, measure and write a draft")
    run.add_argument("gguf", help="the base")
    run.add_argument("prompts", help="what prepare wrote")
    run.add_argument("folder", help="where model.safetensors, config.json, result.json and state.pt go")
    run.add_argument("--seconds", type=float, default=900, help="all that this command may take")
    run.add_argument("--part", type=int, default=1, help="which part of the training this is, from 1")
    run.add_argument("--parts", type=int, default=1, help="in how many commands the training is done")
    run.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="changes of config.Options")
    check = commands.add_parser("check", help="plain speculative decoding with a draft's weights")
    measure = commands.add_parser("measure", help="the figures of a draft's weights, as run prints them at its end")
    for each, number, tokens in ((check, 10, 128), (measure, 64, 480)):
        each.add_argument("gguf")
        each.add_argument("prompts")
        each.add_argument("weights", help="a model.safetensors")
        each.add_argument("--number", type=int, default=number, help="how many held-out prompts")
        each.add_argument("--tokens", type=int, default=tokens, help="how many new tokens for each at most")
    check.add_argument("--cut", action="store_true", help="draft only the tokens of the file's d2t")
    args = parser.parse_args()

    if args.command == "prepare":
        from .prepare import prepare as write

        return write(args.tokenizer, args.prompts)
    if args.command == "smoke":
        from .smoke import smoke

        return smoke()

    from .base import Base

    if args.command == "run" and not 1 <= args.part <= args.parts:
        raise SystemExit(f"there is no part {args.part} of {args.parts}")
    options = Options().with_pairs(args.set if args.command == "run" else [])
    with open(args.prompts) as file:
        prompts = json.load(file)
    base = Base.from_gguf(args.gguf)
    say(f"base: {base.shape}")
    if args.command == "check":
        return check_draft(base, prompts, args, options.steps)
    if args.command == "measure":
        return measure_draft(base, prompts, args, options)
    from .train import run as train

    say(options)
    train(base, prompts, args.folder, args.seconds, args.part, args.parts, options)


def measure_draft(base, prompts, args, options):
    from .corpus import answer_held_out
    from .draft import Draft
    from .evaluate import measure, tables
    from .export import load

    draft = Draft(base.shape)
    vocabulary = load(draft, args.weights)
    measured = answer_held_out(base, prompts, args.number, args.tokens)
    say("the base has answered")
    figures = measure(draft, base, measured, options, prompts["end_of_turn"], vocabulary)
    say(json.dumps(figures))
    print(tables(figures), flush=True)


def check_draft(base, prompts, args, steps):
    from .draft import Draft
    from .export import load
    from .speculate import shares, speculate

    draft = Draft(base.shape)
    vocabulary = load(draft, args.weights)
    rounds = []
    for number, prompt in enumerate(prompts["held_out"][: args.number]):
        cut = vocabulary if args.cut else None
        tokens, accepted = speculate(draft, base, prompt, steps, args.tokens, prompts["end_of_turn"], cut)
        rounds += accepted
        mean = sum(rounds) / len(rounds) + 1
        say(
            f"prompt {number}: {len(tokens)} tokens, {len(accepted)} rounds; in all {len(rounds)} rounds, "
            f"{mean:.3f} tokens a step, first k accepted {shares(rounds, steps)}"
        )


main()
