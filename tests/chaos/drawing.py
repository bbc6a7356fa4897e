"""Which requests are asked: drawn once from a seed, of all kinds and lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, cast

from chaos.cases import GREEDY, Case, Prompt
from tiny_models import VOCABULARY_SIZE
from twinstage.types import SamplingParameters
from twinstage.types.constraints import GrammarBackend, RawStructuredOutput

# Beginnings that several prompts share. Their lengths lie on, before and behind the border of a block of 16 tokens.
_PREFIX_LENGTHS = (15, 64, 161)
_SUBJECTS = ("the sea", "a clockmaker", "winter wheat", "the night train", "an old map", "copper", "two rivers")
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,24}$"},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 9},
        "is_old": {"type": "boolean"},
    },
    "required": ["name", "sizes", "is_old"],
    "additionalProperties": False,
}
_NESTED = 'root ::= item+\nitem ::= [a-z]+ | "(" item+ ")"'
# Workers import PyTorch with XGrammar, in seconds of a processor, when it is first asked for.
_LLGUIDANCE = (
    RawStructuredOutput.json_schema(_SCHEMA),
    RawStructuredOutput.regex("([a-z]{3,9} ){4,40}end"),
    RawStructuredOutput.choice(["the sea is wide", "the sea is deep", "two rivers"]),
    RawStructuredOutput.json_object(),
)
_XGRAMMAR = (
    RawStructuredOutput.json_schema(_SCHEMA, backend=GrammarBackend.XGRAMMAR),
    RawStructuredOutput.json_object(backend=GrammarBackend.XGRAMMAR),
    RawStructuredOutput.grammar(_NESTED),
)


def draw_cases(count: int, *, longest: int, with_xgrammar: bool) -> Iterator[Case]:
    """`count` requests, always the same; prompts and outputs have at most `longest` tokens, and most are short."""
    random = Random(count)
    structures = _LLGUIDANCE + _XGRAMMAR * with_xgrammar
    lengths = [length for length in (1, 2, 3, 17, 40, 120, 300, 700, 1500) if length <= longest]
    weights = [1, 1, 1, 2, 3, 4, 4, 3, 2][: len(lengths)]
    prefixes = [_tokens(random, length) for length in _PREFIX_LENGTHS]
    for number in range(count):
        structure = structures[number // 4 % len(structures)] if number % 4 == 1 else None
        num_choices = random.choice((1, 1, 1, 1, 2, 3))
        prompts = [_prompt(random, prefixes, longest) for _ in range(random.choice((1, 1, 1, 1, 1, 3)))]
        num_continuations = num_choices * len(prompts)
        yield Case(
            num_choices=num_choices,
            observed=random.randrange(num_continuations),
            prompt=prompts[0],
            beside=tuple(prompts[1:]),
            max_tokens=min(random.choices(lengths, weights)[0], longest // num_continuations),
            ignore_eos=structure is None and random.random() < 0.8,
            sampling=_sampling(random),
            logprobs=random.choice((None, None, None, 0, 2, 5)),
            prompt_logprobs=random.choice((0, 3)) if number % 6 == 4 else None,
            structure=structure,
            priority=random.choice((0, 0, 0, 0, 5, -5)),
        )


def _prompt(random: Random, prefixes: list[tuple[int, ...]], longest: int) -> Prompt:
    kind = random.random()
    if kind < 0.25:
        return f"{random.choice(('What is', 'Once there was', 'Numbers such as'))} {random.choice(_SUBJECTS)}"
    if kind < 0.6:
        return (*random.choice(prefixes), *_tokens(random, random.randint(1, 40)))
    lengths = (1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 250, 400, 2 * longest // 3, longest)
    return _tokens(random, random.choice(lengths))


def _tokens(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.randrange(3, VOCABULARY_SIZE) for _ in range(count))


def _sampling(random: Random) -> SamplingParameters:
    if random.random() < 0.35:
        return GREEDY
    seeded = SamplingParameters(
        temperature=random.choice((0.7, 1.0, 1.3)), top_p=random.choice((1.0, 0.9)), seed=random.getrandbits(32)
    )
    changes: tuple[dict[str, float], ...] = (
        {},
        {"top_k": 20},
        {"min_p": 0.02},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
    )
    return replace(seeded, **cast("dict[str, Any]", random.choice(changes)))
