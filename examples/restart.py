# SPDX-License-Identifier: Apache-2.0
"""A restart: a server is killed, and the next one on the same folder goes on with its chat.

Run it with:

    python examples/restart.py MODEL FILE --folder sessions

The prompt is the tokens of the chat so far, so it begins with exactly what the session holds.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai

FLAGS = ["--kv-policy", "cascade", "--kv-budget", "512", "--max-model-len", "1000000"]
FLAGS += ["--kv-sessions", "--enable-prompt-tokens-details"]
SETTLE = 2.0
"""Seconds in which the server writes the last session."""


def start(model: str, port: int, flags: list[str]) -> subprocess.Popen[bytes]:
    """Start a server and wait until it answers."""
    command = ["vllm.entrypoints.cli.main", "serve", model, "--port", str(port), *FLAGS, *flags]
    # A process group of its own, so that one signal ends its engine, too.
    server = subprocess.Popen([sys.executable, "-m", *command], start_new_session=True)
    try:
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                return server
            except OSError:
                time.sleep(0.5)
    except BaseException:  # Ctrl-C does not reach the group
        kill(server)
        raise
    raise SystemExit("the server did not start")


def kill(server: subprocess.Popen[bytes]) -> None:
    """End a server and its engine at once, if they have not ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def turn(client: openai.OpenAI, history: list[int], new: list[int]) -> list[int]:
    """Say something; returns the chat with the answer."""
    answer = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=[*history, *new],
        max_tokens=16,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    details = answer.usage.prompt_tokens_details
    known = (details.cached_tokens or 0) if details else 0
    print(f"{answer.usage.prompt_tokens:,} tokens, {known:,} of them known", flush=True)
    return [*history, *new, *answer.choices[0].token_ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("file", type=Path, help="a long text")
    parser.add_argument("--folder", default="sessions")
    parser.add_argument("--port", type=int, default=8000)
    args, flags = parser.parse_known_args()  # other flags are the server's
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(args.model)(args.file.read_text())["input_ids"]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{args.port}/v1", api_key="none")
    flags += ["--kv-sessions-dir", args.folder]
    server = start(args.model, args.port, flags)
    try:
        history = turn(client, [], tokens[:600])
        history = turn(client, history, tokens[600:800])
        time.sleep(SETTLE)
        kill(server)
        print("killed", flush=True)
        server = start(args.model, args.port, flags)
        turn(client, history, tokens[800:1000])
    finally:
        kill(server)


if __name__ == "__main__":
    main()
