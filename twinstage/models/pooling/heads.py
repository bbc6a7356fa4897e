"""What pooling models compute of one batch, with the model that Transformers makes of the files."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from twinstage.models.load import check_loading, load_stock_model, quiet_loading
from twinstage.models.pooling.after_pooling import Step
from twinstage.models.pooling.pool import pool
from twinstage.types import PoolingInput, PoolingTask


class Batching(enum.Enum):
    """What may be computed together."""

    PACKED = "packed"  # inputs of any lengths, which are put one after the other
    PADDED = "padded"  # inputs of any lengths, which are padded to the longest
    EQUAL = "equal"  # inputs of one length


class Head(Protocol):
    """Computes one batch."""

    batching: Batching

    def compute(self, inputs: Sequence[PoolingInput], task: PoolingTask) -> Sequence[torch.Tensor]:
        """One tensor per input, in order, in float32. Runs in inference mode."""


class Backbone(Protocol):
    """Token ids to hidden states."""

    batching: Batching

    def hidden(self, inputs: Sequence[PoolingInput]) -> torch.Tensor:
        """[tokens of all inputs, one input after the other, without padding; size] in float32."""


class StockBackbone:
    """A model of Transformers, which takes padded batches."""

    batching = Batching.PADDED

    def __init__(self, model: Any, *, takes_token_types: bool) -> None:
        self._model = model
        self._takes_token_types = takes_token_types

    def hidden(self, inputs: Sequence[PoolingInput]) -> torch.Tensor:
        arguments = padded(inputs, self._model.config, takes_token_types=self._takes_token_types)
        states: torch.Tensor = self._model(**arguments).last_hidden_state
        return states[arguments["attention_mask"].bool()]


class EmbeddingHead:
    """A vector of each input, or of each token."""

    def __init__(self, backbone: Backbone, *, modes: Sequence[str], steps: Sequence[Step]) -> None:
        self.batching = backbone.batching
        self._backbone = backbone
        self._modes = modes
        self._steps = steps

    def compute(self, inputs: Sequence[PoolingInput], task: PoolingTask) -> Sequence[torch.Tensor]:
        lengths = [len(entry.token_ids) for entry in inputs]
        hidden = self._backbone.hidden(inputs)
        if task is PoolingTask.TOKEN_EMBED:
            return torch.split(hidden, lengths)
        vectors = pool(hidden, lengths, modes=self._modes, left_out=[entry.prompt_tokens for entry in inputs])
        for step in self._steps:
            vectors = step(vectors)
        return vectors.unbind()


class PooledScoreHead:
    """A vector of a pair, of which the last step of its pipeline makes one number, through an activation: [1]."""

    def __init__(self, pooled: EmbeddingHead, *, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.batching = pooled.batching
        self._pooled = pooled
        self._activation = activation

    def compute(self, inputs: Sequence[PoolingInput], task: PoolingTask) -> Sequence[torch.Tensor]:
        return self._activation(torch.stack(list(self._pooled.compute(inputs, PoolingTask.EMBED)))).unbind()


class ClassifierHead:
    """A classifier's logits through an activation: [labels] of each input."""

    def __init__(
        self, model: Any, *, activation: Callable[[torch.Tensor], torch.Tensor], takes_token_types: bool
    ) -> None:
        self._model = model
        self._activation = activation
        self._takes_token_types = takes_token_types
        # Decoders look for the last token by the padding's id, and without one take no padded batch.
        self.batching = Batching.EQUAL if model.config.pad_token_id is None else Batching.PADDED

    def compute(self, inputs: Sequence[PoolingInput], task: PoolingTask) -> Sequence[torch.Tensor]:
        arguments = padded(inputs, self._model.config, takes_token_types=self._takes_token_types)
        return self._activation(self._model(**arguments).logits).unbind()


class YesNoHead:
    """A generative reranker: how much likelier the next token is yes than no, through an activation: [1]."""

    batching = Batching.PADDED

    def __init__(
        self, model: Any, *, yes: int, no: int | None, activation: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._model = model
        self._yes, self._no = yes, no
        self._activation = activation
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def compute(self, inputs: Sequence[PoolingInput], task: PoolingTask) -> Sequence[torch.Tensor]:
        # Padded on the left, so that the last position is that of every input's last token.
        arguments = padded(inputs, self._model.config, takes_token_types=False, left=True)
        if self._takes_positions:
            arguments["position_ids"] = (arguments["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
        logits = self._model(**arguments, logits_to_keep=1, use_cache=False).logits[:, -1]
        scores = logits[:, self._yes] - (logits[:, self._no] if self._no is not None else 0.0)
        return self._activation(scores.unsqueeze(1)).unbind()


def padded(
    inputs: Sequence[PoolingInput], config: Any, *, takes_token_types: bool, left: bool = False
) -> dict[str, torch.Tensor]:
    """What models of Transformers take, each [inputs, longest]: input_ids, attention_mask and maybe token_type_ids."""
    longest = max(len(entry.token_ids) for entry in inputs)

    def fill(rows: Sequence[Sequence[int]], padding: int) -> torch.Tensor:
        gaps = [[padding] * (longest - len(row)) for row in rows]
        return torch.tensor([[*gap, *row] if left else [*row, *gap] for row, gap in zip(rows, gaps, strict=True)])

    arguments = {
        "input_ids": fill([entry.token_ids for entry in inputs], int(config.pad_token_id or 0)),
        "attention_mask": fill([[1] * len(entry.token_ids) for entry in inputs], 0),
    }
    if takes_token_types and any(entry.token_type_ids for entry in inputs):
        types = [entry.token_type_ids or [0] * len(entry.token_ids) for entry in inputs]
        arguments["token_type_ids"] = fill(types, 0)
    return arguments


def load_encoder(directory: Path) -> Any:
    """The model without a head that Transformers makes of the files. Raises ModelError."""
    from transformers import AutoModel

    # The pooler is a head of its own that pooling leaves unused, so some folders lack its weights.
    return _load(AutoModel, directory, optional="pooler.")


def load_classifier(directory: Path) -> Any:
    """The sequence classifier of the files. Raises ModelError."""
    from transformers import AutoModelForSequenceClassification

    return _load(AutoModelForSequenceClassification, directory)


def load_generator(directory: Path) -> Any:
    """The causal language model of the files. Raises ModelError."""
    return load_stock_model(directory, torch.float32)


def takes_token_types(directory: Path, config: Any) -> bool:
    """Whether the model knows token types, and its tokenizer is one that Transformers lets give them."""
    if (getattr(config, "type_vocab_size", None) or 0) < 2:
        return False
    from transformers import AutoTokenizer

    tokenizer_class: Any = AutoTokenizer
    with quiet_loading(directory):
        tokenizer = tokenizer_class.from_pretrained(directory, local_files_only=True)
    return "token_type_ids" in tokenizer.model_input_names


def _load(model_class: Any, directory: Path, optional: str = "") -> Any:
    with quiet_loading(directory):
        model, info = model_class.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    missing = {name for name in info["missing_keys"] if not (optional and name.startswith(optional))}
    check_loading({"missing_keys": missing}, directory)
    return model.eval()
