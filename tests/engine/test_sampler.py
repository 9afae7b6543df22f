"""Tests for the sampler. The tokens of a request depend only on its own settings."""

from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindie_mm.device import Uploads
from mindie_mm.engine.requests.request import Request
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.engine.sampler import RowSettings, sample, token_logprobs, without_tokens
from mindie_mm.errors import InputError
from mindie_mm.nn.model import ModelSpec, Positions

VOCABULARY = 50
EOS = (2,)


def request(prompt=(5, 6), output=(), **settings) -> Request:
    params = SamplingParams(**settings)
    generator = torch.Generator().manual_seed(params.seed or 0) if params.temperature else None
    return Request(
        request_id="r",
        params=params,
        token_ids=[*prompt, *output],
        num_prompt=len(prompt),
        items=(),
        prompt_positions=Positions(torch.arange(len(prompt)).expand(3, -1)),
        span_ids=None,
        max_tokens=10,
        generator=generator,
    )


def logits(*rows: dict[int, float]) -> torch.Tensor:
    out = torch.zeros(len(rows), VOCABULARY)
    for row, values in zip(out, rows, strict=True):
        for token, value in values.items():
            row[token] = value
    return out


def draws(row: dict[int, float], count=400, **settings) -> Counter:
    drawn = request(temperature=settings.pop("temperature", 1.0), seed=1, **settings)
    return Counter(sample(logits(row), [drawn], EOS).item() for _ in range(count))


def test_end_tokens_beyond_the_vocabulary_are_dropped():
    """`min_tokens` bans end tokens. An id beyond the vocabulary would ban a token of the next row."""
    device, dtype = torch.device("cpu"), torch.float32
    assert ModelSpec(VOCABULARY, 8, 8, (), (2, VOCABULARY, VOCABULARY + 9, -1), device, dtype).eos_token_ids == EOS


def test_greedy_takes_the_most_likely_token():
    assert sample(logits({7: 1.0}, {9: 3.0}), [request(temperature=0)] * 2, EOS).tolist() == [7, 9]


def test_top_k_keeps_k_tokens():
    assert set(draws({1: 5, 3: 4, 4: 3}, top_k=2, temperature=5.0)) == {1, 3}


def test_tokens_as_likely_as_the_last_of_top_k_are_kept_as_in_vllm():
    assert set(draws({1: 5, 3: 4, 4: 4}, top_k=2, temperature=5.0)) == {1, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    # These three tokens have the probabilities 0.67, 0.24 and 0.09. All other tokens together have almost 0.
    row = {1: 12.0, 3: 11.0, 4: 10.0}
    assert set(draws(row, top_p=0.5)) == {1}
    assert set(draws(row, top_p=0.8)) == {1, 3}
    assert set(draws(row, top_p=1e-46)) == {1}, "one token is kept even if top_p underflows in float32"


def test_min_p_drops_tokens_far_below_the_most_likely():
    assert set(draws({1: 12.0, 3: 11.5, 4: 9.0}, min_p=0.5)) == {1, 3}


def test_frequencies_follow_the_distribution():
    counts = draws({1: 3.0 + np.log(3), 3: 3.0 + np.log(1)}, count=4000, top_k=2)
    assert counts[1] / 4000 == pytest.approx(0.75, abs=0.03)


@pytest.mark.slow
def test_rare_tokens_of_a_large_vocabulary_are_drawn_with_their_probability():
    """Together, 100,000 tokens have a probability of 0.1.

    Each probability is too small to change a float32 sum of 1.
    """
    size, rows = 100_007, 64
    row = torch.full((size,), -torch.inf)
    row[5], row[size - 1] = np.log(0.6), np.log(0.3)
    row[7 : size - 1] = np.log(0.1 / (size - 8))
    drawn = [request(seed=number) for number in range(rows)]
    found = torch.cat([sample(row.expand(rows, -1).clone(), drawn, EOS) for _ in range(60)])
    shares = [(found == 5).float().mean(), (found == size - 1).float().mean()]
    assert shares == pytest.approx([0.6, 0.3], abs=0.03)
    rare = found[(found != 5) & (found != size - 1)]
    assert len(rare) / len(found) == pytest.approx(0.1, abs=0.02)
    assert rare.min() >= 7
    assert (rare < size // 2).float().mean() == pytest.approx(0.5, abs=0.1)


def test_a_token_with_probability_zero_is_never_drawn():
    for token in (0, 255, 256, 511, 600):
        row = torch.full((1, 601), -torch.inf)
        row[0, token] = 0
        assert [sample(row.clone(), [request(seed=seed)], EOS).item() for seed in range(50)] == [token] * 50


def test_rounding_of_the_cumulative_sum_never_draws_a_token_with_probability_zero(monkeypatch):
    """On a GPU, the cumulative sum is computed in parallel and may rise by rounding where a weight is zero."""
    own = torch.Tensor.cumsum

    def cumsum(weights, dim):
        return own(weights, dim) + torch.arange(weights.shape[-1]) * 1e-3

    monkeypatch.setattr(torch.Tensor, "cumsum", cumsum)
    row = torch.full((1, 601), -torch.inf)
    row[0, [3, 300]] = 0
    drawn = request(seed=1)
    assert {sample(row.clone(), [drawn], EOS).item() for _ in range(200)} == {3, 300}


def test_a_seed_draws_the_same_tokens_in_a_batch_as_alone():
    row = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3))
    alone = [sample(row[None].clone(), [s], EOS).item() for s in [request(seed=11)] for _ in range(20)]
    among, batched = request(seed=11), []
    for i in range(20):
        others = [request(seed=i), request(temperature=0), request(seed=i + 1, top_p=0.5)]
        batched.append(sample(row.expand(4, -1).clone(), [*others[:2], among, others[2]], EOS).tolist()[2])
    assert alone == batched


def test_logit_bias_raises_and_bans_tokens():
    assert sample(logits({7: 1.0}), [request(temperature=0, logit_bias={9: 5.0})], EOS).tolist() == [9]
    assert sample(logits({7: 1.0}), [request(temperature=0, logit_bias={7: -100})], EOS).tolist() != [7]


def test_penalties_match_their_definitions():
    row = {5: 2.0, 8: 2.1, 9: 2.05}
    # The repetition penalty counts tokens of the prompt and output. The other two count only tokens of the output.
    assert sample(logits(row), [request(prompt=(8,), temperature=0, repetition_penalty=1.2)], EOS).tolist() == [9]
    assert sample(logits(row), [request(prompt=(8,), temperature=0, presence_penalty=2)], EOS).tolist() == [8]
    assert sample(logits(row), [request(output=(8,), temperature=0, presence_penalty=0.06)], EOS).tolist() == [9]
    twice = request(output=(8, 8, 9), temperature=0, frequency_penalty=0.06)
    assert sample(logits(row), [twice], EOS).tolist() == [5]


PREFERENCES = (
    {"logit_bias": {3: 2.5, 7: -1.0}, "repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": -0.3, "min_tokens": 9, "stop_token_ids": (8,)},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.1, "seed": 4, "top_p": 0.9},
    {"seed": 5},
    {"min_tokens": 9, "logit_bias": {2: 100.0}, "frequency_penalty": 1.1, "temperature": 0},
    {"allowed_token_ids": (3, 9, 3, 40), "logit_bias": {3: 1.0}, "seed": 6},
    {"bad_token_ids": ((8, 8, 6), (9,), (1, 7)), "presence_penalty": 0.2, "seed": 7},
)


def preferring(count: int) -> list[Request]:
    """Return `count` requests. Their settings cycle through `PREFERENCES`."""
    return [
        request(prompt=(5, 9, VOCABULARY + number), output=(8, 8, number), **PREFERENCES[number % len(PREFERENCES)])
        for number in range(count)
    ]


def test_penalties_in_a_batch_equal_penalties_alone():
    """In a batch, each row changes exactly as it does alone, bit for bit."""
    count = 2 * len(PREFERENCES)
    rows = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 5
    together = rows.clone()
    tokens = sample(together, preferring(count), EOS).tolist()
    for number, one in enumerate(preferring(count)):
        alone = rows[number : number + 1].clone()
        assert sample(alone, [one], EOS).tolist() == [tokens[number]]
        assert torch.equal(alone[0], together[number])
    assert not torch.equal(together, rows)


class Operators(TorchDispatchMode):
    """A dispatch mode that counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


def test_the_number_of_operators_does_not_grow_with_the_rows():
    """Each operator is a kernel launch on the device."""

    def num_operators(count: int) -> int:
        rows, requests = torch.randn(count, VOCABULARY), preferring(count)
        for one in requests:
            one.params = msgspec.structs.replace(one.params, temperature=0)
        with Operators() as operators:
            sample(rows, requests, EOS)
        return operators.count

    assert num_operators(6 * len(PREFERENCES)) == num_operators(len(PREFERENCES))


def test_settings_that_are_not_used_launch_no_operators():
    rows, requests = torch.randn(2, VOCABULARY), [request(temperature=0)] * 2
    with Operators() as operators:
        sample(rows, requests, EOS)
        without_tokens(rows, requests)
    assert operators.count == 1, "the operator is the argmax of the logits"


class Unread(list):
    """A list that allows only `len`. Reading its items fails."""

    def __iter__(self):
        raise AssertionError("walked")

    def __getitem__(self, key):
        raise AssertionError("copied")


def test_penalties_do_not_iterate_over_the_whole_sequence():
    """Counts are updated with each token, because counting 32,000 tokens again takes 33 ms per step."""
    settings = {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.3}
    whole, grown = request(prompt=(5, 8, 5), output=(8, 9, 9), **settings), request(prompt=(5, 8, 5), **settings)
    for token in (8, 9, 9):
        grown.append(token)
    assert (grown.token_ids, grown.output_ids) == ([5, 8, 5, 8, 9, 9], [8, 9, 9])
    expected = {5: 2 / 1.2, 8: 2.1 / 1.2 - 0.4, 9: -2 * 1.2 - 0.7, 7: 1.0}
    for one in (whole, grown):
        one.token_ids = Unread(one.token_ids)
        row = logits({5: 2.0, 8: 2.1, 9: -2.0, 7: 1.0})
        sample(row, [one], EOS)
        assert row[0, [*expected]].tolist() == pytest.approx([*expected.values()])


def test_prompt_ids_beyond_the_logits_are_skipped():
    """Molmo's image tokens, for example, appear in prompts but have no logits."""
    row = logits({5: 4.0, 7: 3.0})
    penalised = request(
        prompt=(VOCABULARY, 5, VOCABULARY + 3),
        output=(6,),
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        temperature=0,
    )
    assert sample(row, [penalised], EOS).tolist() == [7]
    assert row[0, [5, 6]].tolist() == [2.0, -0.5]
    first, second = token_logprobs(logits({}, {}), [VOCABULARY + 3, 5], num_top=1)
    assert first.logprob == -np.inf
    assert second.logprob == pytest.approx(-np.log(VOCABULARY))


def test_min_tokens_bans_end_and_stop_tokens():
    early = request(temperature=0, min_tokens=2, stop_token_ids=(7,))
    assert sample(logits({2: 9.0, 7: 8.0, 4: 1.0}), [early], EOS).tolist() == [4]
    late = request(output=(4, 4), temperature=0, min_tokens=2)
    assert sample(logits({2: 9.0}), [late], EOS).tolist() == [2]


def test_only_allowed_tokens_are_drawn():
    row = {7: 9.0, 3: 1.0, 4: 0.5}
    assert sample(logits(row, row), [request(temperature=0), request(temperature=0, allowed_token_ids=(4, 3))], EOS)[
        0:2
    ].tolist() == [7, 3]
    assert set(draws(row, allowed_token_ids=(4, 3, 30))) == {3, 4, 30}


def test_only_the_last_token_of_a_bad_sequence_is_banned_and_only_after_its_other_tokens():
    row, bad = {9: 9.0, 4: 8.0, 6: 1.0}, {"temperature": 0, "bad_token_ids": ((8, 3, 9), (4,))}
    assert sample(logits(row), [request(output=(8, 3), **bad)], EOS).tolist() == [6]
    for output in ((), (3,), (8, 3, 3), (8,)):
        assert sample(logits(row), [request(output=output, **bad)], EOS).tolist() == [9]
    assert sample(logits(row), [request(prompt=(8, 3), **bad)], EOS).tolist() == [9], "only tokens of the output count"


def test_rows_whose_settings_exclude_all_tokens_are_found():
    nothing = {"temperature": 0, "allowed_token_ids": (3, 4), "bad_token_ids": ((3,), (4,))}
    rows, requests = logits({5: 1.0}, {5: 1.0}), [request(**nothing), request(temperature=0, allowed_token_ids=(3,))]
    sample(rows, requests, EOS)
    assert without_tokens(rows, requests).tolist() == [True, False]
    assert without_tokens(rows, [request()] * 2) is None


def test_a_rank_counts_the_tokens_that_are_more_likely():
    first, second, third = token_logprobs(logits(*[{7: 3.0, 8: 2.0}] * 3), [7, 8, 20], 0)
    assert (first.rank, second.rank, third.rank) == (1, 2, 3)


def test_logprobs_come_from_the_raw_distribution():
    row = logits({7: 3.0, 8: 2.0})
    (entry,) = token_logprobs(row, [8], 2)
    reference = row[0].log_softmax(-1)
    assert entry.token_id == 8
    assert entry.logprob == pytest.approx(reference[8].item())
    assert [token for token, _ in entry.top] == [7, 8]
    assert entry.top[0][1] == pytest.approx(reference[7].item())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0 must be above 0"),
        ({"repetition_penalty": 0}, r"repetition_penalty=0 must be in \[0.01, 100\]"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5"),
        ({"logprobs": 21}, "logprobs=21"),
        ({"stop": ("",)}, "stop string 0 of 1 is empty"),
        ({"stop": ("a",) * 17}, "17 stop strings"),
        ({"stop_token_ids": (50,)}, "token id 50"),
        ({"logit_bias": {-1: 1.0}}, "token id -1"),
        ({"logit_bias": {1: 101.0}}, "101"),
        ({"presence_penalty": 3}, "presence_penalty=3"),
        ({"stop_token_ids": (2**64,)}, rf"has token id {2**64}; it must be in \[0, {VOCABULARY}\)"),
        ({"logit_bias": {2**64: 1.0}}, rf"has token id {2**64}; it must be in \[0, {VOCABULARY}\)"),
        ({"stop_token_ids": (10**5000,)}, "token id <integer of 16610 bits>"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias=nan"),
        ({"logit_bias": {1: 10**400}}, "is outside its range"),
        ({"seed": 2**64}, f"seed={2**64} must be in"),
        ({"seed": float("inf")}, "seed=inf must be in"),
        ({"max_tokens": 1e300}, r"max_tokens=1e\+300 must be in"),
        ({"max_tokens": 1.5}, "max_tokens=1.5 must be an integer"),
        ({"max_tokens": True}, "max_tokens=True must be an integer"),
        ({"temperature": 10**400}, "temperature=<integer of 1329 bits>"),
    ],
)
def test_the_error_names_the_setting_that_is_out_of_range(settings, words):
    with pytest.raises(InputError, match=words):
        SamplingParams(**settings).check(VOCABULARY)


def test_token_ids_are_limited_before_the_model_is_loaded():
    with pytest.raises(InputError, match=rf"has token id {2**64}; it must be in \[0, {2**31}\)"):
        SamplingParams(stop_token_ids=(2**64,)).check(np.inf)


def test_settings_of_equivalent_types_are_converted():
    """Some JSON libraries write integers as floats. A single stop string and lists are also accepted."""
    integers = {"max_tokens": 16.0, "min_tokens": 1.0, "top_k": 40.0, "seed": 3.0, "logprobs": 2.0}
    given = SamplingParams(**integers, stop="word", stop_token_ids=[4.0], logit_bias={5.0: 1}).check(VOCABULARY)
    meant = {name: int(value) for name, value in integers.items()}
    assert given == SamplingParams(**meant, stop=("word",), stop_token_ids=(4,), logit_bias={5: 1.0})
    assert [type(getattr(given, name)) for name in integers] == [int] * len(integers)
    assert SamplingParams(stop=["a", "b"]).check(VOCABULARY).stop == ("a", "b")


def in_order_of_scores(rows: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """Draw as on accelerators, where all rows of a step are drawn in one way."""
    uploads = Uploads(rows.device)
    return RowSettings.of(requests, rows.shape[1], uploads)._draw_sorted(rows)


def test_accelerators_draw_from_the_same_distribution_in_any_batch():
    row = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3))
    settings = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 5, "min_p": 0.2}]
    kept = [VOCABULARY, 3, None, None, None]
    for number, (own, most) in enumerate(zip(settings, kept, strict=True)):
        alone = request(seed=number, **own)
        found = [in_order_of_scores(row[None].clone(), [alone]).item() for _ in range(100)]
        others = [request(temperature=0), *(request(seed=i, **other) for i, other in enumerate(settings))]
        among = [*others[:2], request(seed=number, **own), *others[2:]]
        batch = row.expand(len(among), -1)
        assert [in_order_of_scores(batch.clone(), among)[2].item() for _ in range(100)] == found
        expected = draws({token: float(value) for token, value in enumerate(row)}, 1000, **own)
        assert {*found} <= {*expected} if own else True
        assert most is None or len({*found}) <= most
        for token, count in expected.most_common(3):
            assert found.count(token) / 100 == pytest.approx(count / 1000, abs=0.15)


def test_accelerators_draw_the_first_of_the_likeliest_tokens_if_a_request_is_greedy():
    rows = logits({3: 4.0, 7: 4.0, 9: 4.0}, {})
    assert in_order_of_scores(rows, [request(temperature=0), request(seed=1)])[0] == 3


@pytest.mark.slow
def test_accelerators_draw_rare_tokens_with_their_probability():
    """The sums of unlikely tokens come first, so that a float32 sum of 1 does not round them away."""
    size, rows = 100_007, 64
    row = torch.full((size,), -torch.inf)
    row[5], row[size - 1] = np.log(0.6), np.log(0.3)
    row[7 : size - 1] = np.log(0.1 / (size - 8))
    drawn = [request(seed=number) for number in range(rows)]
    found = torch.cat([in_order_of_scores(row.expand(rows, -1).clone(), drawn) for _ in range(10)])
    shares = [(found == 5).float().mean(), (found == size - 1).float().mean()]
    assert shares == pytest.approx([0.6, 0.3], abs=0.06)
    rare = found[(found != 5) & (found != size - 1)]
    assert len(rare) / len(found) == pytest.approx(0.1, abs=0.04)
    assert (rare < size // 2).float().mean() == pytest.approx(0.5, abs=0.2)
