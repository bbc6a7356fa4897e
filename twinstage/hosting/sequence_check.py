"""What a worker refuses at its door, so that one wrong sequence never reaches a batch that others share."""

from __future__ import annotations

from collections.abc import Sequence

from twinstage.engine.sequence import admission_violations
from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.types import ModelDescription, PoolingInput, SequenceSpec


def check_sequence(spec: SequenceSpec, model: ModelDescription) -> None:
    """Raise InvalidRequest with everything that makes `spec` impossible for `model`."""
    violations = admission_violations(spec, max_model_len=model.max_model_len)
    violations += _token_violations("sequence.prompt_token_ids", spec.prompt_token_ids, model)
    violations += _token_violations("sequence.resumed_token_ids", spec.resumed_token_ids, model)
    if violations:
        raise InvalidRequest(violations)


def check_inputs(inputs: Sequence[PoolingInput], model: ModelDescription) -> None:
    """Raise InvalidRequest with everything that makes a batch for a pooling model impossible."""
    violations: list[FieldViolation] = []
    for index, entry in enumerate(inputs):
        token_ids = entry.token_ids
        field = f"inputs[{index}].token_ids"
        if not token_ids:
            violations.append(FieldViolation(field, "must not be empty"))
        violations += _token_violations(field, token_ids, model)
        if len(token_ids) > model.max_model_len:
            violations.append(
                FieldViolation(field, f"{len(token_ids)} tokens, but the model's limit is {model.max_model_len}")
            )
        if entry.token_type_ids and len(entry.token_type_ids) != len(token_ids):
            violations.append(FieldViolation(f"inputs[{index}].token_type_ids", "must be as many as the tokens"))
        if entry.prompt_tokens and entry.prompt_tokens >= len(token_ids):
            violations.append(FieldViolation(f"inputs[{index}].prompt_tokens", "leaves no token for the pooling"))
    if violations:
        raise InvalidRequest(violations)


def _token_violations(field: str, token_ids: Sequence[int], model: ModelDescription) -> list[FieldViolation]:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= model.vocab_size):
        return [FieldViolation(field, f"must be token ids from 0 to {model.vocab_size - 1}")]
    return []
