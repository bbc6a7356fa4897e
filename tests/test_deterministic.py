"""Deterministic mode in one process: a request gives the same tokens and logprobs, bit by bit, in any company."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiny_models import VOCABULARY_SIZE
from twinstage.engine.core import EngineCore
from twinstage.engine.llm import LLM, GenerationLimits, GenerationResult, LlmOptions
from twinstage.engine.output import StepOutput
from twinstage.models import row_trial
from twinstage.models.row_trial import WIDTHS, widths_of_equal_rows
from twinstage.types import SamplingParameters

GREEDY = SamplingParameters(temperature=0.0)
SEEDED = SamplingParameters(temperature=0.9, top_p=0.95, seed=11, repetition_penalty=1.1)
BLOCK_BYTES = 16 * 512  # of the tiny model
CHUNK = 32
LENGTHS = (1, 5, 17, 31, 32, 33, 64, 90)  # around the borders of blocks and chunks, and over several chunks


def make_llm(model: Path, *, num_blocks: int = 256, prefix_cache: bool = False) -> LLM:
    options = LlmOptions(
        deterministic=True,
        threads=1,
        kv_cache_bytes=num_blocks * BLOCK_BYTES,
        max_tokens_per_step=CHUNK,
        prefix_cache=prefix_cache,
    )
    return LLM(str(model), options)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with make_llm(tiny_model) as llm:
        yield llm


def random_prompts(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 5) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY_SIZE) for _ in range(length)] for length in lengths]


def generate(llm: LLM, prompts: list[list[int]], sampling: SamplingParameters, tokens: int) -> list[GenerationResult]:
    limits = GenerationLimits(max_tokens=tokens, ignore_eos=True)
    return llm.generate(prompts, sampling, limits=limits, logprobs=5)


def assert_same_bits(results: list[GenerationResult], expected: list[GenerationResult]) -> None:
    for result, alone in zip(results, expected, strict=True):
        assert result.tokens == alone.tokens  # ids, logprobs, ranks and alternatives; the floats by ==


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_alone_and_among_eight_of_mixed_lengths(llm: LLM, sampling: SamplingParameters) -> None:
    prompts = random_prompts()
    together = generate(llm, prompts, sampling, 24)
    assert len({result.token_ids for result in together}) == len(prompts)
    assert_same_bits(together, [generate(llm, [prompt], sampling, 24)[0] for prompt in prompts])
    assert_same_bits(generate(llm, prompts[::-1], sampling, 24), together[::-1])


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preemption_computes_the_same_bits_again(
    llm: LLM, tiny_model: Path, sampling: SamplingParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts((40, 20, 33, 5))
    expected = [generate(llm, [prompt], sampling, 50)[0] for prompt in prompts]
    preempted: list[str] = []
    step = EngineCore.step

    def watched(core: EngineCore) -> StepOutput:
        output = step(core)
        preempted.extend(output.preempted)
        return output

    monkeypatch.setattr(EngineCore, "step", watched)
    with make_llm(tiny_model, num_blocks=12) as small:
        results = generate(small, prompts, sampling, 50)
    assert preempted, "the pool is too large for this test"
    assert_same_bits(results, expected)


def test_a_known_beginning_has_the_bits_of_one_that_is_computed(llm: LLM, tiny_model: Path) -> None:
    """Whole chunks of prompts are taken over; what was output, or the rest of a prompt, is computed in other passes."""
    (prompt,) = random_prompts((2 * CHUNK + 20,))
    with make_llm(tiny_model, prefix_cache=True) as caching:
        (answer,) = generate(caching, [prompt], SEEDED, 50)
        conversation = [*prompt, *answer.token_ids, 7, 8, 9]  # the second turn
        later = [conversation, prompt, prompt[:CHUNK], [*prompt[: CHUNK + 5], 11, 12]]
        for known in later:
            (result,) = generate(caching, [known], SEEDED, 24)
            assert_same_bits([result], generate(llm, [known], SEEDED, 24))
        assert caching.pool.prefix_lookups.found > 0


def test_without_a_width_of_equal_rows_every_row_has_a_pass_of_its_own(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_trial, "WIDTHS", (1,))
    prompts = random_prompts((5, 17, 33))
    with make_llm(tiny_model) as llm:
        assert "rows by 1," in llm.numerics
        together = generate(llm, prompts, SEEDED, 20)
        assert_same_bits(together, [generate(llm, [prompt], SEEDED, 20)[0] for prompt in prompts])


def test_what_decides_the_bits_is_named(tiny_model: Path, llm: LLM) -> None:
    with make_llm(tiny_model) as same:
        assert same.numerics == llm.numerics
    assert f"chunks of {CHUNK}," in llm.numerics
    assert "threads 1," in llm.numerics
    with LLM(str(tiny_model), LlmOptions(kv_cache_bytes=8 * BLOCK_BYTES)) as ordinary:
        assert ordinary.numerics == ""


# --- which rows agree -----------------------------------------------------------------------------


class PickyModel:
    """A model whose results change in the last bit with the width of a pass, and with the place in some passes."""

    vocab_size = 100_000

    def __init__(self, *, classes: dict[int, int], uneven: frozenset[int] = frozenset()) -> None:
        self._classes = classes
        self._uneven = uneven

    def forward_alone(self, token_ids: torch.Tensor, *, position_ids: torch.Tensor) -> torch.Tensor:
        width = len(token_ids)
        logits = torch.stack([token_ids.float(), position_ids.float()], dim=1)
        logits *= 1 + self._classes[width] * 2.0**-20
        if width in self._uneven:
            logits[-1] *= 1 + 2.0**-20
        return logits


@pytest.mark.parametrize(
    ("classes", "uneven", "expected"),
    [
        ((0, 1, 1, 1, 1, 1), (), (4, 8, 16, 32, 64)),
        ((0, 1, 1, 2, 2, 1), (), (4, 8, 64)),
        ((0, 1, 2, 3, 3, 4), (64,), (16, 32)),
        ((0, 1, 1, 1, 1, 1), (4, 8, 16, 32, 64), (1,)),
        ((0, 0, 0, 0, 0, 0), (8,), (1, 4, 16, 32, 64)),
    ],
)
def test_the_widest_set_of_widths_whose_rows_agree(
    classes: tuple[int, ...], uneven: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    model = PickyModel(classes=dict(zip(WIDTHS, classes, strict=True)), uneven=frozenset(uneven))
    assert widths_of_equal_rows(model) == expected  # type: ignore[arg-type]
