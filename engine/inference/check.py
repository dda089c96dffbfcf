"""Reads a vLLM command line the way vLLM does, in a process of its own (see ``launch.check_args``).

Run as ``python -m engine.inference.check deep|shallow FLAGS...``. Exit status 0 when vLLM accepts the flags.
"""

from __future__ import annotations

import sys


def main(depth: str, words: list[str]) -> int:
    """Parse ``words``; ``deep`` also lets vLLM build its configuration from the model's directory."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    try:
        validate_parsed_serve_args(arguments)
        if depth == "deep":
            AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    except (TypeError, ValueError, OSError) as error:
        message = " ".join(str(error).split())
        print(f"error: {type(error).__name__}: {message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
