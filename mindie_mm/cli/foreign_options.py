"""Options of vLLM and SGLang, with what to use here. docs/serve.md has a table for each server that users come from."""

from __future__ import annotations

from collections.abc import Mapping

_OWN = {
    "--model": "Give the model as the argument of `serve` and `doctor`, without --model",
    "--model-path": "Give the model as the argument of `serve` and `doctor`",
    "--trust-remote-code": "Code in a checkpoint is never run. Leave the option out",
    "--chat-template": "The checkpoint's own chat template is always used. Leave the option out",
    "--quantization": "config.json states the quantization. Leave the option out",
    "--gpu-memory-utilization": "Use --memory-share, a share of the free memory instead of the total memory",
    "--mem-fraction-static": "Use --memory-share, a share of the free memory",
    "--speculative-config": "Use --num-speculative-tokens, which guesses tokens as vLLM's method ngram does",
    "--enable-lora": "--lora NAME=FOLDER and --lora-dir FOLDER enable adapters. Leave the option out",
    "--max-cpu-loras": "Adapters stay in the memory of the host. Leave the option out",
    "--enable-prefix-caching": "It is on by default. --no-prefix-caching turns it off",
}
_RENAMED = {
    "--tensor-parallel-size": "--tensor-parallel",
    "--tp-size": "--tensor-parallel",
    "--lora-modules": "--lora NAME=FOLDER for each adapter",
    "--lora-paths": "--lora NAME=FOLDER for each adapter",
    "--max-loras-per-batch": "--max-loras",
    "--data-parallel-size": "--replicas",
    "--dp-size": "--replicas",
    "--block-size": "--kv-block-size",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--allowed-local-media-path": "--allowed-media-dir",
    "--enable-log-requests": "--log-prompts",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--allowed-origins": "--cors-origin",
}
FOREIGN_OPTIONS: Mapping[str, str] = _OWN | {name: f"Use {own}" for name, own in _RENAMED.items()}
