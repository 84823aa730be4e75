"""Runs inside a venv that has vLLM. The first line of standard input says what to load; each further one is a batch to
generate, answered by its seconds. Answers stand on lines that begin with `MARK`, for vLLM prints too."""

import json
import os
import sys
import time

MARK = "omni-bench "


def main() -> None:
    began = time.perf_counter()
    from vllm import LLM, SamplingParams

    ask = json.loads(sys.stdin.readline())
    model = LLM(
        ask["model"],
        dtype=ask["dtype"],
        max_model_len=2048,
        max_num_seqs=16,
        enable_prefix_caching=False,
        enforce_eager=ask["eager"],
    )
    _say({"ready": time.perf_counter() - began, "rss": _memory()})
    for line in sys.stdin:
        batch = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=batch["new"], ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        began = time.perf_counter()
        model.generate(inputs, params, use_tqdm=False)
        _say({"seconds": time.perf_counter() - began})


def _say(answer: dict[str, float]) -> None:
    print("\n" + MARK + json.dumps(answer), flush=True)


def _memory() -> float:
    """Bytes of this process and its children."""
    import psutil

    me = psutil.Process(os.getpid())
    return float(sum(one.memory_info().rss for one in (me, *me.children(recursive=True))))


if __name__ == "__main__":
    main()
