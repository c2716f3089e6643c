# SPDX-License-Identifier: Apache-2.0
"""A chat without an end: the server keeps its state between turns and reads only what is new.

Run it with:

    vllm serve MODEL --kv-policy sink --kv-budget 2048 --kv-recall 8 --max-model-len 10000000 \\
        --kv-sessions --kv-sessions-dir sessions --enable-prompt-tokens-details
    python examples/endless_chat.py chat.json

The client sends the whole conversation each turn, as every OpenAI client does, and keeps it in a
file. After a restart of client or server the chat goes on where it was. The file also has a salt:
what the server keeps of this chat serves no request without it.

A model that thinks also needs ``--reasoning-parser``. Its thoughts are sent back: some chat
templates keep them, and the server goes on from the answer. Others leave them out, and it goes on
from the state before the answer, which ``--reasoning-parser`` lets it keep.
"""

import argparse
import json
import secrets
import sys
from pathlib import Path
from typing import Any

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer")
    parser.add_argument("chat", type=Path, help="file that holds the conversation")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url, api_key="none")
    model = client.models.list().data[0].id
    chat: dict[str, Any] = {"salt": secrets.token_hex(16), "messages": []}
    if args.chat.exists():
        chat = json.loads(args.chat.read_text())
    messages = chat["messages"]
    for line in sys.stdin:  # one line is one turn
        messages.append({"role": "user", "content": line.strip()})
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=args.max_tokens,
            temperature=0,
            extra_body={
                "cache_salt": chat["salt"],
                # The name keeps the session while other, unnamed ones leave.
                "vllm_xargs": {"kv_session": args.chat.stem},
            },
        )
        message = answer.choices[0].message
        text = message.content
        messages.append({"role": "assistant", "content": text})
        if thoughts := getattr(message, "reasoning", None):
            messages[-1]["reasoning"] = thoughts
        args.chat.write_text(json.dumps(chat))
        details = answer.usage.prompt_tokens_details
        known = (details.cached_tokens or 0) if details else 0
        print(text)
        print(f"[{answer.usage.prompt_tokens:,} tokens, {known:,} of them known]", flush=True)


if __name__ == "__main__":
    main()
