"""Runs inside a venv that has vLLM: reads what to do on standard input, prints the seconds of each batch as its last line."""

import json
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    ask = json.loads(sys.stdin.read())
    model = LLM(ask["model"], dtype=ask["dtype"], max_model_len=2048, max_num_seqs=16, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=ask["new"], ignore_eos=True)
    seconds = []
    for batch in ask["batches"]:
        inputs = [{"prompt_token_ids": prompt} for prompt in batch]
        model.generate(inputs, params, use_tqdm=False)
        began = time.perf_counter()
        model.generate(inputs, params, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    print("\n" + json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
