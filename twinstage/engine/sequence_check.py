"""What a worker refuses at its door, so that one wrong sequence never reaches a batch that others share."""

from __future__ import annotations

from collections.abc import Sequence

from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.types import ModelDescription, SequenceSpec


def check_sequence(spec: SequenceSpec, model: ModelDescription) -> None:
    """Raise InvalidRequest with everything that makes `spec` impossible for `model`."""
    violations = _token_violations("sequence.prompt_token_ids", spec.prompt_token_ids, model)
    if spec.resumed_token_ids:
        violations += _token_violations("sequence.resumed_token_ids", spec.resumed_token_ids, model)
    known = len(spec.prompt_token_ids) + len(spec.resumed_token_ids)
    if known + 1 > model.max_model_len:
        violations.append(
            FieldViolation(
                "sequence.prompt_token_ids",
                f"{known} tokens leave no room for another one: the model's limit is {model.max_model_len}",
            )
        )
    if spec.max_tokens <= len(spec.resumed_token_ids):
        violations.append(
            FieldViolation("sequence.max_tokens", f"must be more than the {len(spec.resumed_token_ids)} resumed tokens")
        )
    if violations:
        raise InvalidRequest(violations)


def check_inputs(inputs: Sequence[Sequence[int]], model: ModelDescription) -> None:
    """Raise InvalidRequest with everything that makes a batch for a pooling model impossible."""
    violations: list[FieldViolation] = []
    for index, token_ids in enumerate(inputs):
        field = f"inputs[{index}].token_ids"
        violations += _token_violations(field, token_ids, model)
        if len(token_ids) > model.max_model_len:
            violations.append(
                FieldViolation(field, f"{len(token_ids)} tokens, but the model's limit is {model.max_model_len}")
            )
    if violations:
        raise InvalidRequest(violations)


def _token_violations(field: str, token_ids: Sequence[int], model: ModelDescription) -> list[FieldViolation]:
    if not token_ids:
        return [FieldViolation(field, "must not be empty")]
    if min(token_ids) < 0 or max(token_ids) >= model.vocab_size:
        return [FieldViolation(field, f"must be token ids from 0 to {model.vocab_size - 1}")]
    return []
