"""vLLM on CPU as a peer process, in its own environment: float32, the engine in this very process.

Run it with the interpreter of that environment. Its speculation is configured as its documentation shows, with the
OpenMP library it recommends. Prefix caching is off, so that no run profits from an earlier one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# Set before the import that reads them: no second process, no binding of threads to cores, 1 GiB of KV cache.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import vllm
from protocol import Generated, Request, serve

SPECULATION: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix", "num_speculative_tokens": 32},
}


class VllmContender:
    def __init__(self, options: dict[str, Any]) -> None:
        drafter = options.get("drafter")
        self.settings = {
            "dtype": "float32",
            "enforce_eager": bool(options.get("eager", False)),
            "enable_prefix_caching": False,
            "max_num_seqs": options["max_batch"],
            "max_model_len": options["max_length"],
            "speculative_config": SPECULATION[drafter] if drafter else None,
        }
        # Only the counters tell how many draft tokens were accepted, so they run if there is something to count.
        self._llm = vllm.LLM(
            options["model"], skip_tokenizer_init=True, disable_log_stats=drafter is None, seed=0, **self.settings
        )
        self.versions = {"vllm": vllm.__version__, "vllm's torch": torch.__version__}
        self._is_counted = drafter is not None

    def generate(self, request: Request) -> Generated:
        sampling = vllm.SamplingParams(
            temperature=request.temperature, max_tokens=request.num_tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in request.prompts]
        before = self._counters()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return Generated(token_ids, self._accept_length(before, sum(map(len, token_ids))))

    def _counters(self) -> float:
        """Accepted draft tokens so far, over all runs."""
        if not self._is_counted:
            return 0.0
        named = {metric.name: metric for metric in self._llm.get_metrics()}
        return float(named["vllm:spec_decode_num_accepted_tokens"].value)

    def _accept_length(self, before: float, num_tokens: int) -> float | None:
        """Tokens per sequence and step: every step emits one token of the policy after those accepted."""
        if not self._is_counted:
            return None
        return num_tokens / (num_tokens - (self._counters() - before))


def _preload_openmp() -> None:
    """Restart this process with Intel's OpenMP preloaded: vLLM warns that its speculation is slow without it."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if "LD_PRELOAD" not in os.environ and library.exists():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": str(library)})


if __name__ == "__main__":
    _preload_openmp()
    serve(VllmContender)
