# SPDX-License-Identifier: Apache-2.0
"""Recall: a question about text that was evicted, with and without recall.

Run it with:

    vllm serve MODEL --kv-policy sink --kv-budget 512 --kv-recall 8
    python examples/recall.py FILE
"""

import argparse
from pathlib import Path

import openai

FACT = "The pass key is 71432. Remember it. 71432 is the pass key."
QUESTION = "What is the pass key? The pass key is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--characters", type=int, default=6000, help="of FILE after the fact")
    parser.add_argument("file", type=Path, help="a long text")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url, api_key="none")
    model = client.models.list().data[0].id
    text = args.file.read_text()
    begin, rest = text[:1000], text[1000 : 1000 + args.characters]
    for name, own in (("with recall", {}), ("without recall", {"kv_recall": 0})):
        answer = client.completions.create(
            model=model,
            prompt=f"{begin}\n\n{FACT}\n\n{rest}\n\n{QUESTION}",
            max_tokens=8,
            temperature=0,
            extra_body={"vllm_xargs": own},
        )
        print(f"{name}: {answer.choices[0].text.strip()}")


if __name__ == "__main__":
    main()
