# SPDX-License-Identifier: Apache-2.0
"""Takes the steps of an engine with the code of one checkout, one step a command.

``python -P stepper.py CHECKOUT`` with ``PYTHONPATH`` set to the checkout. The first line of stdin
is a JSON object: ``engine``, arguments of ``LLM``, ``policy``, settings of ``kv_policy``, and
``prompts``, lists of token ids. Each further line is a command and is answered by one line:

* ``add TOKENS``: every prompt becomes a request that generates so many tokens. ``added``.
* ``step``: one step of the engine. Its milliseconds, and ``reads`` if a prompt was not yet read
  to its end when it began, else ``decodes``; ``none`` if no request is left.

Like ``child.py`` it imports nothing from this folder.
"""

import importlib
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any


def answers(llm: Any, prompts: list[list[int]]) -> None:
    """Answer the commands of stdin."""
    from vllm import SamplingParams

    engine, numbers = llm.llm_engine, itertools.count()
    waiting = set[str]()
    for line in sys.stdin:
        command = line.split()
        if command[0] == "add":
            params = SamplingParams(
                max_tokens=int(command[1]), ignore_eos=True, temperature=0, detokenize=False
            )
            for prompt in prompts:
                name = str(next(numbers))
                waiting.add(name)
                engine.add_request(name, {"prompt_token_ids": prompt}, params)
            print("added", flush=True)
        elif not engine.has_unfinished_requests():
            print("none", flush=True)
        else:
            kind = "reads" if waiting else "decodes"
            begin = time.perf_counter()
            outputs = engine.step()
            elapsed = time.perf_counter() - begin
            waiting -= {output.request_id for output in outputs}
            print(elapsed * 1e3, kind, flush=True)


def main(checkout: Path) -> None:
    """Start the engine, then answer."""
    package = importlib.import_module("vllm_cascade")
    assert Path(package.__file__ or "").is_relative_to(checkout), package.__file__
    from vllm import LLM

    given = json.loads(sys.stdin.readline())
    llm = LLM(**given["engine"], additional_config={"kv_policy": given["policy"]})
    answers(llm, given["prompts"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
