"""`perilune COMMAND …`: finds the command's module, imports only that one, and calls its `main(argv)`.

Every module behind a command has `main(argv: Sequence[str]) -> int` and its own argparse parser. Exit status:
the command's; 2 for a wrong call or a wrong document, 74 when a disk is full, 130 after Ctrl-C, 141 when the
reader of a pipe left.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from importlib import import_module
from typing import NamedTuple

from perilune_lab.exits import INTERRUPTED, NOT_WRITTEN, PIPE_CLOSED, WRONG_CALL, wrong_call


class Command(NamedTuple):
    module: str
    summary: str
    example: str


COMMANDS = {
    "demo": Command(
        "perilune_lab.demo.cli",
        "real Envoy, gateway and simulated engines under agentic load; compares policies",
        "perilune demo --endpoints 4 --seconds 20 --compare round_robin",
    ),
    "replay": Command(
        "perilune_lab.replay",
        "send a trace, or generated agentic load, to any OpenAI-compatible URL and measure",
        "perilune replay --target http://127.0.0.1:10000 --trace agentic --limit 200",
    ),
    "engine": Command(
        "perilune_lab.engine.main",
        "one simulated vLLM server: OpenAI API, KV events, metrics, H20 timing",
        "perilune engine --listen 127.0.0.1:8000 --time-scale 10",
    ),
    "explain": Command(
        "perilune_lab.explain",
        "why a request went where it went, and where other policies would have sent it",
        "perilune explain REQUEST_ID --gateway http://127.0.0.1:9003",
    ),
    "whatif": Command(
        "perilune_lab.whatif.cli",
        "recorded decisions of a gateway, decided again under other policies or parameters",
        "perilune whatif --decisions decisions.jsonl --policy all",
    ),
    "bench-stream": Command(
        "perilune_lab.bench_stream.cli",
        "a burst of streamed requests, timed by client and engine; serial against batched misses",
        "perilune bench-stream --target http://127.0.0.1:8000 --num-requests 32 --unique-prompts",
    ),
    "simulate": Command(
        "perilune_research.simulator.cli",
        "what-if: every routing policy on modelled H20s, same seeds, with confidence intervals",
        "perilune simulate --policies ear,dynamo,round_robin --rates 1 --seeds 4",
    ),
    "crosscheck": Command(
        "perilune_research.crosscheck.cli",
        "one workload live and simulated, side by side: does the simulator tell the truth?",
        "perilune crosscheck --policies ear,round_robin --seconds 20",
    ),
    "fastpath": Command(
        "perilune_research.fastpath.cli",
        "do decisions from headers alone equal those that know the body? every turn weighed twice",
        "perilune fastpath --policies ear,perilune --turns 1000",
    ),
    "evaluate": Command(
        "perilune_research.evaluate.cli",
        "the whole evaluation on modelled H20s: every policy, bars, ten figures, tables, as files",
        "perilune evaluate --quick --out /tmp/evaluation",
    ),
    "trace": Command(
        "perilune_lab.traces.cli",
        "what a trace is made of: lengths, sessions, reuse, best possible hit rate",
        "perilune trace stats mooncake_conversation.jsonl.gz",
    ),
}

_DISK = {ENOSPC, EDQUOT, EFBIG, EIO}


def _parser() -> argparse.ArgumentParser:
    lines = ["commands:"]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<13}{command.summary}", f"{'':15}$ {command.example}", ""]
    lines.append("`perilune COMMAND --help` explains one. The gateway alone: `perilune-gateway --help`.")
    parser = argparse.ArgumentParser(
        prog="perilune",
        usage="perilune COMMAND …",
        description="Routes LLM requests to where their KV cache is nearest. These are the lab's tools.",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    return parser


def _version() -> str:
    from importlib.metadata import version

    return f"perilune {version('perilune')}"


def _find(name: str) -> Callable[[Sequence[str]], int]:
    main: Callable[[Sequence[str]], int] = import_module(COMMANDS[name].module).main
    return main


def _dispatch(argv: Sequence[str]) -> int:
    if argv and argv[0] in COMMANDS:
        return _find(argv[0])(argv[1:])
    parser = _parser()
    args, _ = parser.parse_known_args(argv)
    if args.version:
        print(_version())
        return 0
    if args.command is None:
        parser.print_help()
        return 0 if not argv else WRONG_CALL
    near = get_close_matches(args.command, COMMANDS, n=1)
    hint = f"; did you mean `perilune {near[0]}`?" if near else ""
    known = ", ".join(COMMANDS)
    return wrong_call("perilune", f"unknown command {args.command!r}{hint} (commands: {known})")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit status; argparse errors leave by SystemExit(2)."""
    _open_what_is_closed()
    try:
        try:
            return _dispatch(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _leave_stdout()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in _DISK:
            raise
        _leave_stdout()
        print(f"perilune: {error.strerror}: not everything was written", file=sys.stderr)
        return NOT_WRITTEN
    except Exception as error:
        from perilune_api.pool import SpecError

        if not isinstance(error, SpecError):
            raise
        return wrong_call("perilune", error)


def _open_what_is_closed() -> None:
    """Whoever starts us with `>&-` wants to read nothing: what is written there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends


def _leave_stdout() -> None:
    """The interpreter's own flush at exit must not complain of what ours met."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
