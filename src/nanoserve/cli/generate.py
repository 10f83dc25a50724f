"""nanoserve generate"""

from __future__ import annotations

import argparse
import sys

from nanoserve.cli.flags import engine_config
from nanoserve.cli.sampling import sampling_params


def generate(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    sampling_params(arguments)  # what is wrong with a flag is said before the model loads
    prompt = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
    from nanoserve.llm import LLM

    llm = LLM(**vars(config))
    params = sampling_params(arguments, llm.info.sampling_defaults)
    if params.n == 1:
        for delta in llm.stream(prompt, params):
            print(delta.text, end="", flush=True)
        print()
        return 0
    for output in llm.generate(prompt, params)[0].outputs:
        print(f"--- {output.index + 1} of {params.n}\n{output.text}")
    return 0
