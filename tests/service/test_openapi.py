"""The interface's description is true: schemathesis asks after it and believes it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindie_mm.engine.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from tools.serving import RunningService

ROUTES = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/{name}",
    "/infer",
    "/generate",
    "/generate_stream",
    "/tokenize",
    "/detokenize",
    "/health",
    "/health/live",
    "/v2/health/ready",
    "/v2/health/live",
    "/ping",
    "/version",
    "/metrics",
    "/shm",
}


ELSEWHERE = {"n", "best_of"}
"""Numbers that are no setting of the sampler."""
NAMES = {"top_logprobs": "logprobs", "max_completion_tokens": "max_tokens"}
"""Settings of the sampler that have another name there."""


def test_every_route_is_described(http: Any) -> None:
    described = http.get("/openapi.json").json()
    assert set(described["paths"]) >= ROUTES
    for operations in described["paths"].values():
        for operation in operations.values():
            assert operation["description"]
            assert "422" not in operation["responses"]


@pytest.mark.parametrize("body", ["ChatBody", "CompletionBody"])
def test_numbers_have_the_ranges_of_the_sampler(http: Any, body: str) -> None:
    """Of each, the outermost that the description allows is taken, and what is next to it is not."""
    properties = http.get("/openapi.json").json()["components"]["schemas"][body]["properties"]
    numbers = {name: number for name, described in properties.items() for number in numeric(described)}
    assert len(numbers) > 11
    for name in numbers.keys() - ELSEWHERE:
        number = numbers[name]
        for side, outward in (("inimum", -1), ("aximum", 1)):
            kind, step = (int, outward) if number["type"] == "integer" else (float, outward * 1e-6)
            if f"exclusiveM{side}" in number:
                outside = kind(number[f"exclusiveM{side}"])
                last = outside - step
            else:
                last = kind(number[f"m{side}"])
                outside = last + step
            if (name, last) in {("top_k", -1), ("max_tokens", 0)}:  # all, and the prompt alone: not the engine's words
                continue
            setting = NAMES.get(name, name)
            SamplingParams(**{setting: last}).check(vocab_size=100)
            with pytest.raises(InputError, match=setting):
                SamplingParams(**{setting: outside}).check(vocab_size=100)


def numeric(described: dict[str, Any]) -> list[dict[str, Any]]:
    return [of for of in described.get("anyOf", ()) if of.get("type") in ("integer", "number")]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("phases", "examples"), [("fuzzing", 5), pytest.param("coverage,fuzzing", 10, marks=pytest.mark.slow)]
)
def test_schemathesis(service: RunningService, http: Any, tmp_path: Path, phases: str, examples: int) -> None:
    """Wrong requests are refused, no request is a 5xx, statuses, types and bodies are those described.

    Not asked: that every request of the described form is answered. No schema says which model is served, what
    a message or an image holds, which ids are in the vocabulary, what joins several fields (`stream_options` and
    `stream`, `min_tokens` and `max_tokens`), or what the context still holds.
    """
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli"),
            "run",
            f"{service.url}/openapi.json",
            *("--phases", phases, "--max-examples", str(examples), "--seed", "1"),
            *("--exclude-checks", "positive_data_acceptance", "--request-timeout", "60", "--no-color"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=170,
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-1000:]
    assert http.get("/health").status_code == 200
    assert service.wait_until_free()["blocks"] == 0
