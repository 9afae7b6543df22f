"""Tests that the choices of a request with a seed use consecutive seeds, which wrap around."""

from typing import Any

LEAST, MOST = -(2**63), 2**63 - 1


def test_the_seed_after_the_greatest_is_the_least(http: Any) -> None:
    def texts(seed: int, n: int) -> list[str]:
        body = {"prompt": "What?", "temperature": 5, "max_tokens": 8, "ignore_eos": True, "seed": seed, "n": n}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in sorted(answer.json()["choices"], key=lambda choice: choice["index"])]

    together = texts(MOST, 3)
    assert len(set(together)) == 3
    assert together == texts(MOST, 1) + texts(LEAST, 2)
