"""The `draftsmith` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from draftsmith.data import DraftsmithError

GREEN, RESET = "\033[32m", "\033[0m"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="draftsmith", description="Lossless speculative decoding with distilled "
                                     "drafts.")
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", help="answer a prompt, streaming")
    generate.add_argument("bundle", help="bundle folder")
    generate.add_argument("prompt", help="the prompt; '-' reads standard input")
    generate.add_argument("--target", help="target folder or hub name (default: the one named in the bundle)")
    generate.add_argument("--policy", help="ar, fixed(k), paper or goodput (default: the bundle's)")
    generate.add_argument("--max-tokens", type=int, default=256)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, help="makes sampled text repeatable, whatever the policy")
    generate.add_argument("--stop", action="append", default=[], help="stop string (repeatable)")
    generate.add_argument("--raw", action="store_true", help="continue the text as it is, without chat template")
    generate.add_argument("--color", action="store_true", help="show tokens that came from the draft in green")
    generate.add_argument("--trust-remote-code", action="store_true", help="let the target's folder run its own code")
    generate.add_argument("--stats", action="store_true", help="print figures to standard error at the end")
    return parser


def run_generate(args: argparse.Namespace) -> None:
    from .decoder import Decoder
    from .sampling import SamplingParams

    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, top_k=args.top_k,
                            top_p=args.top_p, seed=args.seed, stop=tuple(args.stop))
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text.strip():
        raise DraftsmithError("the prompt is empty")
    decoder = Decoder.load(args.bundle, args.target, not sys.stderr.isatty(), args.trust_remote_code)
    chat = not args.raw and getattr(decoder.tokenizer, "chat_template", None)
    output = None
    for chunk in decoder.stream([{"role": "user", "content": text}] if chat else text, params, args.policy):
        for token, piece in chunk.pieces:
            green = args.color and piece and token.source == "accepted"
            sys.stdout.write(f"{GREEN}{piece}{RESET}" if green else piece)
        sys.stdout.flush()
        output = chunk.output
    sys.stdout.write("\n")
    if args.stats and output is not None:
        s = output.stats
        rate = f"{s.acceptance_rate:.2f}" if s.acceptance_rate is not None else "none judged"
        per_step = f"{s.tokens_per_step:.2f}" if s.tokens_per_step is not None else "-"
        print(f"{s.emitted} tokens in {s.seconds:.2f} s ({s.emitted / max(s.seconds, 1e-9):.1f}/s), acceptance "
              f"{rate}, {per_step} tokens per step, finished by {output.finish_reason}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        run_generate(args)
    except DraftsmithError as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndraftsmith: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
