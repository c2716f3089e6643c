# SPDX-License-Identifier: Apache-2.0
"""Per-request budgets: short requests hold fewer pages of a server than long ones.

Run it with:

    vllm serve MODEL --kv-policy sink --kv-budget 2048
    python examples/per_request_budgets.py FILE
"""

import argparse
from pathlib import Path

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url, api_key="none")
    model = client.models.list().data[0].id
    for budget in args.budgets:
        try:
            answer = client.completions.create(
                model=model,
                prompt=args.file.read_text(),
                max_tokens=16,
                temperature=0,
                extra_body={"vllm_xargs": {"kv_budget": budget}},
            )
        except openai.BadRequestError as error:
            print(f"{budget:5}: refused: {error.body['message']}")
        else:
            print(f"{budget:5}: {answer.choices[0].text!r}")


if __name__ == "__main__":
    main()
