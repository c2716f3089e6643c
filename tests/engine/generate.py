# SPDX-License-Identifier: Apache-2.0
"""Generate and print tokens and log-probabilities.

Run by ``test_stock.py`` in a fresh interpreter: ``generate.py MODEL '{"kv_policy": "full"}'``.
"""

import json
import sys


def main(model: str, arguments: dict) -> None:
    if "kv_policy" in arguments:
        import vllm_cascade  # noqa: F401 - LLM(kv_policy=...) needs it

    from vllm import LLM, SamplingParams

    llm = LLM(model, enforce_eager=True, kv_cache_memory_bytes=64 << 20, **arguments)
    prompts = [[(7 * i * k) % 4000 + 1 for i in range(1, n)] for k, n in ((1, 300), (3, 40))]
    params = SamplingParams(max_tokens=40, temperature=0.0, logprobs=3, prompt_logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    result = [
        [
            list(output.outputs[0].token_ids),
            [
                {str(token): value.logprob.hex() for token, value in (entry or {}).items()}
                for entry in [*output.prompt_logprobs, *output.outputs[0].logprobs]
            ],
        ]
        for output in outputs
    ]
    print("RESULT " + json.dumps(result, sort_keys=True))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
