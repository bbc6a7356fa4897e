"""A stock Transformers model made to run on paged KV, without touching its modules.

The model computes one row that holds the tokens of several sequences one after another; positions come from
`position_ids`, and attention from `attention.paged_attention`. Whether a model can run like this is not looked up in a
list but tried: `adapt_model` runs it both ways on a few tokens and refuses it when the logits differ.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from twinstage.errors import ModelError
from twinstage.kv.layout import KvLayout
from twinstage.kv.store import KvStore
from twinstage.models.attention import ATTENTION_NAME, AttentionCall, AttentionContext, PagedAttention, scaled_attention
from twinstage.models.attention_alone import FilledUpAttention, OwnTokenAttention
from twinstage.models.batch import PagedBatch

_PROBE_LENGTHS = (7, 4)  # tokens of two sequences packed into the trial pass; the second is the start of the first
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest logit
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})


class PagedModel:
    """A causal language model on paged KV. Made by `adapt_model`; used by one thread at a time.

    `rows_are_independent`: whether a token gets the same bits whatever else is in the pass and however its prompt is
    cut into chunks. The BLAS behind stock modules does not give that.
    """

    rows_are_independent = False

    def __init__(
        self, model: Any, *, kv_shape: KvShape, kv_dtype: str, vocab_size: int, max_model_len: int, fingerprint: str
    ) -> None:
        self._model = model
        self._kv_shape = kv_shape
        self._kv_dtype = kv_dtype
        self._fingerprint = fingerprint
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.weight_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())

    def kv_layout(self, block_size: int) -> KvLayout:
        """The layout of this model's keys and values in blocks of `block_size` tokens."""
        return KvLayout(
            num_layers=self._kv_shape.num_layers,
            num_kv_heads=self._kv_shape.num_kv_heads,
            head_dim=self._kv_shape.head_dim,
            block_size=block_size,
            dtype=self._kv_dtype,
            model_fingerprint=self._fingerprint,
        )

    def forward(self, batch: PagedBatch, store: KvStore) -> torch.Tensor:
        """Compute all tokens of `batch`, leaving their keys and values in `store`.

        Returns float32 logits `[rows, vocab_size]`, of each chunk its last `num_logits` tokens, in their order.
        """
        context = PagedAttention(batch, store)
        return run_packed(self._model, batch.token_ids, batch.position_ids, rows=batch.sampled_rows, context=context)

    def forward_rows(self, batch: PagedBatch, store: KvStore, *, width: int) -> torch.Tensor:
        """`forward` for tokens that come alone, in a pass filled up to `width` rows, each sequence attended alone.

        Returns float32 logits `[width, vocab_size]`, those of the batch's tokens first; none when none are wanted.
        """
        padding = (0, width - len(batch.token_ids))
        return run_packed(
            self._model,
            torch.nn.functional.pad(batch.token_ids, padding),
            torch.nn.functional.pad(batch.position_ids, padding),
            rows=torch.arange(width if len(batch.sampled_rows) else 0),
            context=FilledUpAttention(PagedAttention(batch, store, attend_alone=True), num_rows=len(batch.token_ids)),
        )

    def forward_alone(self, token_ids: torch.Tensor, *, position_ids: torch.Tensor) -> torch.Tensor:
        """Logits `[num_tokens, vocab_size]` of tokens that see only themselves; nothing is stored. For trials."""
        rows = torch.arange(len(token_ids))
        return run_packed(self._model, token_ids, position_ids, rows=rows, context=OwnTokenAttention())

    def close(self) -> None:
        """As of a fused model, which has threads to end; here there is nothing to do."""


class KvShape:
    """Layers, KV heads and head size, as seen in a trial pass; all layers must agree."""

    def __init__(self, seen: dict[int, tuple[int, int]], *, num_layers: int, model_name: str) -> None:
        if not seen:
            raise ModelError(f"{model_name} does not compute attention through Transformers' AttentionInterface")
        if sorted(seen) != list(range(num_layers)):
            raise ModelError(f"{model_name} has {num_layers} layers, of which {len(seen)} use attention as it is known")
        if len(set(seen.values())) > 1:
            raise ModelError(
                f"{model_name} has layers with different KV heads or head sizes: {sorted(set(seen.values()))}"
            )
        self.num_layers = num_layers
        self.num_kv_heads, self.head_dim = seen[0]


def adapt_model(model: Any, *, kv_dtype: str, max_model_len: int, fingerprint: str) -> PagedModel:
    """Make a loaded stock model run on paged KV, which keeps keys and values in `kv_dtype`.

    Raises ModelError that names the reason when the model cannot: attention of a kind that is not implemented, layers
    with uneven KV heads, state other than keys and values, or logits that differ from the stock model's.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    _check_layer_types(config, name)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name} cannot compute the logits of chosen tokens only (logits_to_keep)")
    token_ids = (torch.arange(max(_PROBE_LENGTHS)) * 7919 + 13) % config.vocab_size
    with torch.inference_mode():
        expected = model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0].float()
    model.set_attn_implementation(ATTENTION_NAME)
    probe = _ProbeAttention()
    packed = torch.cat([token_ids[:length] for length in _PROBE_LENGTHS])
    positions = torch.cat([torch.arange(length) for length in _PROBE_LENGTHS])
    actual = run_packed(model, packed, positions, rows=torch.arange(len(packed)), context=probe)
    kv_shape = KvShape(probe.seen, num_layers=config.num_hidden_layers, model_name=name)
    _check_windows(config, probe.windows, name=name, max_model_len=max_model_len)
    _check_equal(actual, torch.cat([expected[:length] for length in _PROBE_LENGTHS]), dtype=model.dtype, name=name)
    return PagedModel(
        model,
        kv_shape=kv_shape,
        kv_dtype=kv_dtype,
        vocab_size=expected.shape[-1],
        max_model_len=max_model_len,
        fingerprint=fingerprint,
    )


def run_packed(
    model: Any, token_ids: torch.Tensor, position_ids: torch.Tensor, *, rows: torch.Tensor, context: AttentionContext
) -> torch.Tensor:
    """One forward pass over packed tokens `[num_tokens]`; float32 logits `[len(rows), vocab_size]`."""
    with torch.inference_mode():
        output = model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            attention_mask=None,  # Transformers makes no mask for an attention function that has no mask function
            use_cache=False,
            logits_to_keep=rows,
            twinstage_context=context,
        )
        logits: torch.Tensor = output.logits[0]
    return logits.to(torch.float32)


class _ProbeAttention:
    """The context of the trial pass: no store, attention within each sequence, and a record of what it saw."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int]] = {}  # layer -> (KV heads, head size)
        self.windows: dict[int, int | None] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer in self.seen:
            raise ModelError(f"layer {call.layer} computes attention twice in one pass")
        if call.key.shape != call.value.shape or call.query.shape[2] != call.key.shape[2]:
            raise ModelError(f"keys are {tuple(call.key.shape)} and values {tuple(call.value.shape)}: not of one size")
        if call.query.shape[0] % call.key.shape[0]:
            raise ModelError(f"{call.query.shape[0]} heads cannot share {call.key.shape[0]} KV heads evenly")
        num_kv_heads, _, head_dim = call.key.shape
        self.seen[call.layer] = (num_kv_heads, head_dim)
        self.windows[call.layer] = call.sliding_window
        outputs = []
        for tokens in (slice(0, _PROBE_LENGTHS[0]), slice(_PROBE_LENGTHS[0], sum(_PROBE_LENGTHS))):
            key, value = call.key[:, tokens].unsqueeze(1), call.value[:, tokens].unsqueeze(1)
            query = call.query[:, tokens].reshape(num_kv_heads, -1, key.shape[2], head_dim)
            output = scaled_attention(query, key, value, mask=None, call=call)
            outputs.append(output.flatten(0, 1).transpose(0, 1))
        return torch.cat(outputs)


def _check_layer_types(config: Any, name: str) -> None:
    """Refuse layers that keep something else than keys and values of all (or the last) tokens."""
    unknown = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if unknown:
        raise ModelError(f"{name} has layers of type {', '.join(sorted(unknown))}, which cannot run on paged KV")


def _check_windows(config: Any, windows: dict[int, int | None], *, name: str, max_model_len: int) -> None:
    """Refuse a model whose sliding window is only in its masks, when the window is short enough to matter."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ()
    expected = {layer for layer, layer_type in enumerate(layer_types) if layer_type == "sliding_attention"}
    without = sorted(layer for layer in expected if windows.get(layer) is None)
    if without and (window is None or window < max_model_len):
        raise ModelError(f"{name} does not pass the sliding window of layer {without[0]} to its attention function")


def _check_equal(actual: torch.Tensor, expected: torch.Tensor, *, dtype: torch.dtype, name: str) -> None:
    difference = (actual - expected).abs().max().item()
    limit = _TOLERANCES[dtype] * max(1.0, expected.abs().max().item())
    if not difference <= limit:  # NaN differs too
        raise ModelError(f"{name} computes other logits on paged KV than by itself (they differ by {difference:.3g})")
