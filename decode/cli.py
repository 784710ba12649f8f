"""The `draftsmith` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftsmith.data import DraftsmithError

if TYPE_CHECKING:
    from .decoder import Decoder

EXAMPLES = """\
a bundle is what training makes (bash scripts/quickstart.sh makes one); a target with any smaller model of its
tokenizer (--draft MODEL), or with none (--draft none), works too:

  draftsmith generate runs/quickstart/bundle "A table trips(id, minutes). SQL for the longest trip?" --color --stats
  draftsmith generate TARGET "Once upon a time" --draft SMALLER_MODEL --raw
  draftsmith bench runs/quickstart/bundle --policies "ar,fixed(4),goodput"
  draftsmith serve runs/quickstart/bundle            then open http://127.0.0.1:8000
  draftsmith doctor TARGET SMALLER_MODEL

draftsmith COMMAND --help lists a command's options."""

GREEN, RESET = "\033[32m", "\033[0m"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="draftsmith", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Makes a language model answer faster without changing what it says: a small draft proposes "
                    "tokens,\nthe model (the target) verifies them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("bundle", help="bundle folder; with --draft, the target (a folder or hub name)")
    shared.add_argument("--draft", help="any smaller model of the target's tokenizer as the draft, or 'none' for "
                        "prompt lookup alone")
    shared.add_argument("--target", help="target folder or hub name (default: the one named in the bundle)")
    shared.add_argument("--precision", default="auto", help="of the target: auto, fp32, bf16 or int8")
    shared.add_argument("--draft-precision", default="auto", help="of the draft: auto (the faster), plain or int8")
    shared.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    shared.add_argument("--trust-remote-code", action="store_true", help="let the target's folder run its own code")

    generate = commands.add_parser("generate", help="answer a prompt, streaming", parents=[shared])
    generate.add_argument("prompt", help="the prompt; '-' reads standard input")
    generate.add_argument("--policy", help="ar, fixed(k), mtv(w1,w2,...), lookup(k), hybrid(k), paper or "
                          "goodput (default: the bundle's)")
    generate.add_argument("--max-tokens", type=int, default=256)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--min-p", type=float, default=0.0)
    generate.add_argument("--repetition-penalty", type=float, default=1.0)
    generate.add_argument("--presence-penalty", type=float, default=0.0)
    generate.add_argument("--frequency-penalty", type=float, default=0.0)
    generate.add_argument("--seed", type=int, help="makes sampled text repeatable, whatever the policy")
    generate.add_argument("--stop", action="append", default=[], help="stop string (repeatable)")
    generate.add_argument("--raw", action="store_true", help="continue the text as it is, without chat template")
    generate.add_argument("--color", action="store_true", help="show tokens that came from the draft in green")
    generate.add_argument("--stats", action="store_true", help="print figures to standard error at the end")
    generate.set_defaults(run=run_generate)

    bench = commands.add_parser("bench", help="measure policies and the engine on this machine", parents=[shared])
    bench.add_argument("--policies", default="ar,fixed(4),goodput", help="comma-separated; the first is compared with")
    bench.add_argument("--prompts", help="JSONL or text file of prompts (default: built-in ones)")
    bench.add_argument("--count", type=int, default=8, help="number of prompts")
    bench.add_argument("--max-tokens", type=int, default=64)
    bench.add_argument("--profile", action="store_true", help="say where the time of each policy goes")
    bench.add_argument("--references", action="store_true", help="compare with transformers and llama.cpp")
    bench.add_argument("--passes", action="store_true", help="time target passes by rows, context and batch instead")
    bench.add_argument("--linears", action="store_true", help="time the target's products by kind instead")
    bench.add_argument("--json", help="also write the figures to this file")
    bench.set_defaults(run=run_bench)

    serve = commands.add_parser("serve", help="an OpenAI-compatible server with a playground", parents=[shared])
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    serve.add_argument("--port", type=int, default=8000, help="default: 8000; 0: any that is free")
    serve.add_argument("--name", help="what clients call the model (default: the target's name)")
    serve.add_argument("--policy", help="of requests that name none (default: the bundle's)")
    serve.add_argument("--api-key", help="clients must send it (default: DRAFTSMITH_API_KEY, or none)")
    serve.add_argument("--slots", type=int, default=4, help="answers written at a time (default: 4)")
    serve.add_argument("--queue", type=int, default=64, help="may wait before clients get 429 (default: 64)")
    serve.add_argument("--context", type=int, help="tokens of prompt and answer (default: at most 4096)")
    serve.add_argument("--max-body", type=float, default=4.0, metavar="MIB", help="largest request (default: 4)")
    serve.add_argument("--allow-origin", action="append", default=[], metavar="URL",
                       help="web page of another host that may call (repeatable)")
    serve.set_defaults(run=run_serve)

    doctor = commands.add_parser("doctor", help="whether a draft fits a target, and from which acceptance it pays")
    doctor.add_argument("target", help="target folder or hub name")
    doctor.add_argument("draft", help="draft folder or hub name, or a bundle folder")
    doctor.add_argument("--measure", action="store_true", help="load both and time them, instead of estimating")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--trust-remote-code", action="store_true", help="let a model's folder run its own code")
    doctor.set_defaults(run=run_doctor)
    return parser


def load(args: argparse.Namespace, quiet: bool) -> Decoder:
    import torch

    from .decoder import Decoder

    if args.threads is not None:
        if args.threads < 1:
            raise DraftsmithError(f"--threads must be 1 or more, not {args.threads}")
        torch.set_num_threads(args.threads)
    if args.draft is not None:
        if args.target is not None:
            raise DraftsmithError("with --draft the first argument is the target: leave out --target")
        draft = None if args.draft == "none" else args.draft
        return Decoder.pair(args.bundle, draft, args.trust_remote_code, args.precision, args.draft_precision)
    return Decoder.load(args.bundle, args.target, quiet, args.trust_remote_code, args.precision, args.draft_precision)


def run_generate(args: argparse.Namespace) -> None:
    from .sampling import SamplingParams

    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, top_k=args.top_k,
                            top_p=args.top_p, min_p=args.min_p, repetition_penalty=args.repetition_penalty,
                            presence_penalty=args.presence_penalty, frequency_penalty=args.frequency_penalty,
                            seed=args.seed, stop=tuple(args.stop))
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text.strip():
        raise DraftsmithError("the prompt is empty")
    decoder = load(args, quiet=not sys.stderr.isatty())
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


def run_bench(args: argparse.Namespace) -> None:
    from draftsmith.data.io import write_json

    from . import benchtables

    if args.count < 2:
        raise DraftsmithError(f"--count must be 2 or more, for an interval; not {args.count}")
    if args.references and args.draft is not None:
        raise DraftsmithError("--references compares a bundle's draft: leave out --draft")
    decoder = load(args, quiet=False)
    if args.passes:
        figures, text = benchtables.passes(decoder)
    elif args.linears:
        figures, text = benchtables.linears(decoder)
    elif args.references:
        figures, text = benchtables.others(decoder, args.policies, args.prompts, args.count,
                                           args.max_tokens, args.trust_remote_code)
    else:
        figures, text = benchtables.policies(decoder, args.policies, args.prompts, args.count, args.max_tokens,
                                             args.profile)
    print(text)
    if args.json:
        write_json(args.json, figures)


def run_serve(args: argparse.Namespace) -> None:
    try:
        from .serving.run import Address, serve
    except ImportError as error:
        raise DraftsmithError(f"the server needs its packages: pip install 'draftsmith[serve]' ({error})") from error
    with Address(args.host, args.port) as address:  # taken before the model is loaded
        serve(load(args, quiet=False), address, args)


def run_doctor(args: argparse.Namespace) -> None:
    from . import doctor

    doctor.run_doctor(args)


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
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
