# SPDX-License-Identifier: Apache-2.0
"""An agent with tools that reads a file page by page, in one conversation of bounded memory.

Run it with:

    vllm serve MODEL --kv-policy sink --kv-budget 2048 --kv-recall 8 --max-model-len 1000000 \\
        --enable-auto-tool-choice --tool-call-parser hermes
    python examples/agent_with_tools.py FILE "What happens in it?"
"""

import argparse
import json
from pathlib import Path
from typing import Any

import openai

PAGE = 1500  # characters


def tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "strict": True, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--turns", type=int, default=8, help="most pages read")
    parser.add_argument("file", type=Path)
    parser.add_argument("question")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url, api_key="none")
    model = client.models.list().data[0].id
    text = args.file.read_text()
    pages = [text[i : i + PAGE] for i in range(0, len(text), PAGE)]
    tools = [
        tool("read_page", "Read a page.", page={"type": "integer", "enum": [*range(len(pages))]}),
        tool("finish", "Give the final answer.", answer={"type": "string", "maxLength": 200}),
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"Read pages 0 to {len(pages) - 1}, then finish."},
        {"role": "user", "content": args.question},
    ]
    for turn in range(args.turns + 1):
        name = "finish" if turn == args.turns else "read_page" if turn == 0 else None
        choice = {"type": "function", "function": {"name": name}} if name else "required"
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=tools,
            tool_choice=choice,
            temperature=0,
            max_tokens=300,
        )
        call = answer.choices[0].message.tool_calls[0]
        given = json.loads(call.function.arguments)
        print(f"{answer.usage.prompt_tokens:,} tokens: {call.function.name} {given}")
        if call.function.name == "finish":
            break
        messages.append({"role": "assistant", "content": f"I read page {given['page']}."})
        messages.append({"role": "user", "content": pages[given["page"]]})


if __name__ == "__main__":
    main()
