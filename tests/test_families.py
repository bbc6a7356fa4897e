"""Every supported family on paged KV against the stock Transformers model, and refusals of what cannot be adapted."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from tiny_models import MAX_MODEL_LEN, VOCABULARY_SIZE, make_tiny_model
from twinstage.errors import ConfigError, ModelError
from twinstage.kv.memory import BlockMemory
from twinstage.kv.store import KvStore
from twinstage.models.adapt import PagedModel
from twinstage.models.batch import PagedChunk, make_batch
from twinstage.models.load import load_model
from twinstage.models.resolve import resolve_model

_SIZES = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": MAX_MODEL_LEN,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**_GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**_GROUPED, head_dim=12),
    "mistral": lambda: transformers.MistralConfig(**_GROUPED, sliding_window=9),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_GROUPED, head_dim=10, sliding_window=7, layer_types=_MIXED_LAYERS, query_pre_attn_scalar=10
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **_GROUPED, head_dim=10, sliding_window=7, layer_types=_MIXED_LAYERS, query_pre_attn_scalar=10
    ),
    "phi3": lambda: transformers.Phi3Config(**_GROUPED, sliding_window=None),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_SIZES, use_parallel_residual=True),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_embd=48,
        n_layer=3,
        n_head=6,
        n_positions=MAX_MODEL_LEN,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    ),
    "olmo2": lambda: transformers.Olmo2Config(**_GROUPED),
}
PROMPT_LENGTHS = (1, 4, 13, 38, 75)
NUM_GREEDY_TOKENS = 50


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same weights twice."""

    paged: PagedModel
    stock: Any


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = make_tiny_model(tmp_path_factory.mktemp(request.param) / "model", FAMILIES[request.param]())
    return Pair(load_model(resolve_model(str(directory))), AutoModelForCausalLM.from_pretrained(directory).eval())


class Paged:
    """Drives a paged model by hand: every sequence owns shuffled blocks that nobody cleared."""

    def __init__(self, model: PagedModel, *, block_size: int, num_sequences: int, max_len: int) -> None:
        self._model = model
        self._block_size = block_size
        layout = model.kv_layout(block_size)
        per_sequence = layout.blocks_for(max_len)
        num_blocks = per_sequence * num_sequences
        self.memory = BlockMemory.create(num_blocks=num_blocks, block_bytes=layout.block_bytes)
        self._store = KvStore(layout, self.memory)
        self._store.blocks.fill_(torch.inf)  # what a former owner may have left
        block_ids = list(range(num_blocks))
        random.Random(7).shuffle(block_ids)
        self._tables = [block_ids[index * per_sequence :][:per_sequence] for index in range(num_sequences)]

    def forward(self, work: Sequence[tuple[int, Sequence[int], int]]) -> torch.Tensor:
        """Run (sequence, token ids, start) in one batch; the logits after each chunk."""
        chunks = [
            PagedChunk(token_ids=tokens, start=start, block_ids=self._tables[sequence], num_logits=1)
            for sequence, tokens, start in work
        ]
        return self._model.forward(make_batch(chunks, block_size=self._block_size), self._store)


def _prompts(lengths: Sequence[int]) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, VOCABULARY_SIZE) for _ in range(length)] for length in lengths]


def _prefill(paged: Paged, prompts: Sequence[Sequence[int]], *, chunk: int, check: Callable[..., None]) -> list[int]:
    """Prefill all prompts side by side in chunks of several sizes; the greedy token after each."""
    done = [0] * len(prompts)
    first = [0] * len(prompts)
    while any(done[index] < len(prompt) for index, prompt in enumerate(prompts)):
        work = []
        for index, prompt in enumerate(prompts):
            part = prompt[done[index] : done[index] + chunk + index]
            if part:
                work.append((index, part, done[index]))
        logits = paged.forward(work)
        for (index, part, start), row in zip(work, logits, strict=True):
            done[index] = start + len(part)
            check(index, done[index] - 1, row)
            first[index] = int(row.argmax())
    return first


def _stock_logits(stock: Any, token_ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return stock(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


@pytest.mark.parametrize(("block_size", "chunk"), [(5, 6), (16, 200)])
def test_logits_and_greedy_tokens_equal_stock(pair: Pair, block_size: int, chunk: int) -> None:
    prompts = _prompts(PROMPT_LENGTHS)
    expected_logits = [_stock_logits(pair.stock, prompt) for prompt in prompts]
    paged = Paged(pair.paged, block_size=block_size, num_sequences=len(prompts), max_len=max(PROMPT_LENGTHS) + 60)

    def check(index: int, position: int, row: torch.Tensor) -> None:
        torch.testing.assert_close(row, expected_logits[index][position], atol=1e-4, rtol=0)

    tokens = [[token] for token in _prefill(paged, prompts, chunk=chunk, check=check)]
    for step in range(NUM_GREEDY_TOKENS - 1):
        work = [(index, [tokens[index][-1]], len(prompt) + step) for index, prompt in enumerate(prompts)]
        logits = paged.forward(work)
        for index, row in enumerate(logits):
            tokens[index].append(int(row.argmax()))
    for index, prompt in enumerate(prompts):
        after_each = _stock_logits(pair.stock, [*prompt, *tokens[index][:-1]])[len(prompt) - 1 :]
        torch.testing.assert_close(logits[index], after_each[-1], atol=1e-4, rtol=0)
        # Every token is the stock model's first choice after all tokens before it, which is what greedy means.
        assert tokens[index] == after_each.argmax(dim=-1).tolist(), f"prompt {index}"
    assert len({tuple(row) for row in tokens}) == len(prompts), "the tiny model must tell its prompts apart"


def test_a_row_does_not_depend_on_the_others_in_its_batch(pair: Pair) -> None:
    prompts = _prompts((9, 33))
    alone, together = (
        Paged(pair.paged, block_size=4, num_sequences=2, max_len=64),
        Paged(pair.paged, block_size=4, num_sequences=2, max_len=64),
    )
    for paged in (alone, together):
        paged.forward([(0, prompts[0], 0)])
        paged.forward([(1, prompts[1], 0)])
    separate = torch.cat([alone.forward([(0, [5], 9)]), alone.forward([(1, [6], 33)])])
    # One decodes while the other takes its next chunk, in one batch.
    mixed = together.forward([(0, [5], 9), (1, [6], 33)])
    torch.testing.assert_close(mixed, separate, atol=1e-5, rtol=0)


def test_sliding_windows_matter_in_these_tests(tmp_path: Path) -> None:
    """The window of the tiny Mistral changes its logits, so that a window that is ignored cannot pass above."""
    directory = make_tiny_model(tmp_path / "model", FAMILIES["mistral"]())
    stock = AutoModelForCausalLM.from_pretrained(directory)
    unlimited = AutoModelForCausalLM.from_pretrained(directory, sliding_window=None)
    prompt = _prompts((38,))[0]
    assert (_stock_logits(stock, prompt) - _stock_logits(unlimited, prompt))[-1].abs().max() > 0.01


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_close_to_stock(tmp_path: Path, dtype: str) -> None:
    directory = make_tiny_model(tmp_path / "model", FAMILIES["llama"](), weight_scale=1.0)
    model = load_model(resolve_model(str(directory)), dtype=dtype)
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    prompt = _prompts((30,))[0]
    paged = Paged(model, block_size=4, num_sequences=1, max_len=40)
    paged.forward([(0, prompt[:20], 0)])
    logits = paged.forward([(0, prompt[20:], 20)])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[0], _stock_logits(stock, prompt)[-1], atol=2e-2, rtol=0)
    assert model.kv_layout(4).dtype == dtype


def test_a_pass_without_sampled_rows_has_no_logits(pair: Pair) -> None:
    layout = pair.paged.kv_layout(4)
    memory = BlockMemory.create(num_blocks=2, block_bytes=layout.block_bytes)
    chunk = PagedChunk(token_ids=[3, 4, 5], start=0, block_ids=[1], num_logits=0)
    logits = pair.paged.forward(make_batch([chunk], block_size=4), KvStore(layout, memory))
    assert logits.shape == (0, pair.paged.vocab_size)


def test_layout_follows_the_model(tmp_path: Path) -> None:
    resolved = resolve_model(str(make_tiny_model(tmp_path / "model", FAMILIES["qwen3"]())))
    layout = load_model(resolved).kv_layout(16)
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (3, 2, 12)
    assert layout.dtype == "float32"
    assert layout.model_fingerprint == resolved.fingerprint


# --- refusals -------------------------------------------------------------------------------------


def _refused(tmp_path: Path, config: PretrainedConfig, **arguments: Any) -> str:
    directory = make_tiny_model(tmp_path / "model", config)
    with pytest.raises(ModelError) as refusal:
        load_model(resolve_model(str(directory)), **arguments)
    return str(refusal.value)


def test_attention_sinks_are_refused(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(**_GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    assert "s_aux" in _refused(tmp_path, config)


def test_alibi_is_refused(tmp_path: Path) -> None:
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY_SIZE, hidden_size=48, n_layer=2, n_head=6, max_position_embeddings=64
    )
    assert "AttentionInterface" in _refused(tmp_path, config)


def test_recurrent_layers_are_refused(tmp_path: Path) -> None:
    config = transformers.Lfm2Config(**_GROUPED, layer_types=["conv", "full_attention", "conv"])
    assert "conv" in _refused(tmp_path, config)


def test_bidirectional_attention_is_refused(tmp_path: Path) -> None:
    assert "not causal" in _refused(tmp_path, transformers.BertConfig(**_SIZES))


def test_other_numbers_than_stock_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose attention would come out differently is found by the trial, whatever the reason."""
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaAttention.forward", _without_positions)
    assert "other logits" in _refused(tmp_path, transformers.LlamaConfig(**_GROUPED))


def _without_positions(
    self: Any, hidden_states: torch.Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
) -> Any:
    """An attention layer with a twist of its own when it is not run by the stock implementation."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (
        projection(hidden_states).view(shape).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    name = self.config._attn_implementation
    attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[name]
    kwargs.pop("cache", None)
    output, _ = attend(self, query, key, value, attention_mask, scaling=0.1 if name == "sdpa" else 0.3, **kwargs)
    return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = make_tiny_model(tmp_path / "model", FAMILIES["llama"]())
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 parameters.*layers\.1\.mlp\.up_proj"):
        load_model(resolve_model(str(directory)))


def test_max_model_len_is_checked_before_the_weights_load(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model", FAMILIES["llama"]())
    resolved = resolve_model(str(directory))
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"max_model_len {MAX_MODEL_LEN + 1} is above {MAX_MODEL_LEN}"):
        load_model(resolved, max_model_len=MAX_MODEL_LEN + 1)
    with pytest.raises(ConfigError, match="at least 1"):
        load_model(resolved, max_model_len=0)
    with pytest.raises(ConfigError, match="float64"):
        load_model(resolved, dtype="float64")
