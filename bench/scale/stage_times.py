"""Stage times of a service, as `bench.scale.stages` has measured them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Processor time that a request takes in each process until its first token, in seconds."""

    client_s: float
    service_s: float
    tokenizer_s: float
    decoder_s: float
    engine_s: float
    """Time of a step that computes the prompt of this request alone."""
    prompt_tokens: int = 0
    idle_s: float = 0.0
    """Time in which the request waits although none of these processes works: messages and wake-ups of processes."""


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Processor time that the later tokens of requests take outside the engine, in seconds.

    The engine sends one message per step. The message contains a token of each running request.
    """

    service_message_s: float = 0.0
    service_token_s: float = 0.0
    client_message_s: float = 0.0
    client_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Time of an engine's steps."""

    decode_step_s: Mapping[int, float]
    """Time of a step by the number of sequences that decode, in seconds. Empty if decoding takes no time."""
    idle_s: float = 0.0
    """Time between two steps in which the engine does not work, in seconds."""

    def step_s(self, decodes: int, prompts: Sequence[float]) -> float:
        """Return the seconds of a step in which `decodes` sequences decode.

        `prompts` are the times of the prompts in this step, each measured in a step of its own. The part of a step that
        does not depend on its sequences is counted once.
        """
        shared = max(0, len(prompts) - (0 if decodes else 1)) * self._fixed_s
        return max(sum(prompts) - shared, 0.0) + (self._decode_s(decodes) if decodes else 0.0)

    @property
    def _fixed_s(self) -> float:
        """Time of a step without sequences, extrapolated from the steps with one and with two sequences."""
        if not self.decode_step_s:
            return 0.0
        one, two = self.decode_step_s[1], self.decode_step_s[2]
        return max(0.0, one - max(0.0, two - one))

    def _decode_s(self, decodes: int) -> float:
        """Return the time of a decode step, interpolated between the measured batches."""
        steps = sorted(self.decode_step_s.items())
        if not steps:
            return 0.0
        below = max((step for step in steps if step[0] <= decodes), default=steps[0])
        above = min((step for step in steps if step[0] >= decodes), default=steps[-1])
        if below[0] == above[0]:
            return above[1] * max(1.0, decodes / above[0])  # beyond the largest batch, in proportion
        return below[1] + (above[1] - below[1]) * (decodes - below[0]) / (above[0] - below[0])


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The measured times of a checkpoint."""

    images: Mapping[str, RequestTimes]
    """Times of a request with a new image, by the size of the image."""
    repeated: Mapping[str, RequestTimes]
    """Times of a request whose image was sent before to the same engine, by the size of the image."""
    tokens: TokenTimes
    engine: EngineTimes
    contention: float
    """Slowdown of work while all processors are busy, as a factor."""

    @classmethod
    def read(cls, checkpoint: str, path: Path = RESULTS / "scale_stages.json") -> Self:
        """Return the times of a checkpoint, such as `tiny`, from a file of `bench.scale.stages`."""
        return cls.of(json.loads(path.read_text(encoding="utf-8")), checkpoint)

    @classmethod
    def of(cls, figures: Mapping[str, Any], checkpoint: str) -> Self:
        """Return the times of a checkpoint from the figures of `bench.scale.stages`."""
        measured = figures[checkpoint]
        decoders = sorted(
            (int(name.rpartition("_")[2]), seconds)
            for name, seconds in figures["full_size"].items()
            if name.startswith("decoder_of_")
        )
        return cls(
            {size: _request(one) for size, one in measured["images"].items()},
            {size: _request(one) for size, one in measured["repeated"].items()},
            _tokens(measured),
            _engine(measured["decode_step"], measured["token_1"]),
            max(1.0, decoders[-1][1] / decoders[0][1]),
        )


def full_size(path: Path = RESULTS / "scale_stages.json") -> dict[str, RequestTimes]:
    """Return the times on a host whose engine runs on an accelerator, with images at full size, by their size.

    The time of the service does not depend on the checkpoint. It was measured with the embedded one.
    """
    figures = json.loads(path.read_text(encoding="utf-8"))
    served = figures["tiny"]["images"]
    return {
        size: RequestTimes(0.0, served[size]["service"], one["tokenizer"], one["decoder"], 0.0, one["prompt_tokens"])
        for size, one in figures["full_size"]["sizes"].items()
    }


def _request(seconds: Mapping[str, Any]) -> RequestTimes:
    names = ("client", "service", "tokenizer", "decoder", "engine")
    times = [seconds[name] for name in names]
    return RequestTimes(*times, seconds.get("prompt_tokens", 0), max(0.0, seconds["wait"] - sum(times)))


def _engine(steps: Mapping[str, float], token: Mapping[str, float]) -> EngineTimes:
    """Add to the steps of an engine alone what a step with one sequence takes longer in a service.

    There, each step wakes the service and the client, which take the processor and its caches from the engine.
    """
    longer_s = max(0.0, token["engine"] - steps["1"])
    times = {int(batch): seconds + longer_s for batch, seconds in steps.items()}
    return EngineTimes(times, max(0.0, token["wait"] - times[1]))


def _tokens(measured: Mapping[str, Any]) -> TokenTimes:
    """Divide the time of a token into a part per message and a part per token.

    With one client, each message has one token. With several clients, a message has a token for each of them.
    """
    alone = measured["token_1"]
    crowd = next(name for name in measured if name.startswith("token_") and name != "token_1")
    clients = int(crowd.removeprefix("token_"))
    message = {
        name: max(0.0, (alone[name] - measured[crowd][name]) * clients / (clients - 1))
        for name in ("service", "client")
    }
    return TokenTimes(
        message["service"],
        max(0.0, alone["service"] - message["service"]),
        message["client"],
        max(0.0, alone["client"] - message["client"]),
    )
