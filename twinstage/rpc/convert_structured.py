"""Conversion of structured output between domain types and the messages of both APIs."""

from __future__ import annotations

from twinstage.types.constraints import (
    DEFAULT_REASONING_END,
    Constraint,
    ConstraintForm,
    GrammarBackend,
    OutputConstraint,
    RawReasoning,
    RawStructuredOutput,
)
from twinstage.v1 import common_pb2
from twinstage.worker.v1 import worker_pb2

_BACKEND_TO_PROTO = {
    GrammarBackend.XGRAMMAR: common_pb2.GRAMMAR_BACKEND_XGRAMMAR,
    GrammarBackend.LLGUIDANCE: common_pb2.GRAMMAR_BACKEND_LLGUIDANCE,
}
_BACKEND_FROM_PROTO = {value: key for key, value in _BACKEND_TO_PROTO.items()}


def structured_output_from_proto(message: common_pb2.StructuredOutput) -> RawStructuredOutput:
    """As a client sent it. A backend that is not known is none; `json_object: false` is no form."""
    name = message.WhichOneof("constraint")
    form = None if name is None or (name == "json_object" and not message.json_object) else ConstraintForm(name)
    value = getattr(message, name) if name is not None else ""
    return RawStructuredOutput(
        form=form,
        text=value if isinstance(value, str) else "",
        choices=tuple(message.choice.values),
        backend=_BACKEND_FROM_PROTO.get(message.backend),
        reasoning=_reasoning_from_proto(message.reasoning) if message.HasField("reasoning") else None,
    )


def _reasoning_from_proto(message: common_pb2.ReasoningConstraint) -> RawReasoning:
    return RawReasoning(
        end=message.end if message.HasField("end") else DEFAULT_REASONING_END,
        constraint=structured_output_from_proto(message.constraint) if message.HasField("constraint") else None,
    )


def structured_output_to_proto(raw: RawStructuredOutput) -> common_pb2.StructuredOutput:
    """For a client to send."""
    message = common_pb2.StructuredOutput()
    if raw.backend is not None:
        message.backend = _BACKEND_TO_PROTO[raw.backend]
    if raw.form is ConstraintForm.JSON_OBJECT:
        message.json_object = True
    elif raw.form is ConstraintForm.CHOICE:
        message.choice.CopyFrom(common_pb2.ChoiceConstraint(values=raw.choices))
    elif raw.form is not None:
        setattr(message, raw.form.value, raw.text)
    if raw.reasoning is not None:
        message.reasoning.end = raw.reasoning.end
        if raw.reasoning.constraint is not None:
            message.reasoning.constraint.CopyFrom(structured_output_to_proto(raw.reasoning.constraint))
    return message


def output_constraint_to_proto(constraint: OutputConstraint) -> worker_pb2.OutputConstraint:
    return worker_pb2.OutputConstraint(
        answer=_grammar_to_proto(constraint.answer),
        reasoning_end_ids=constraint.reasoning_end_ids,
        reasoning=_grammar_to_proto(constraint.reasoning) if constraint.reasoning is not None else None,
    )


def output_constraint_from_proto(message: worker_pb2.OutputConstraint) -> OutputConstraint:
    """Raises ValueError for a backend or form that is unknown here."""
    return OutputConstraint(
        answer=_grammar_from_proto(message.answer),
        reasoning_end_ids=tuple(message.reasoning_end_ids),
        reasoning=_grammar_from_proto(message.reasoning) if message.HasField("reasoning") else None,
    )


def _grammar_to_proto(constraint: Constraint) -> worker_pb2.Grammar:
    return worker_pb2.Grammar(
        backend=constraint.backend.value,
        form=constraint.form.value,
        text=constraint.text,
        choices=constraint.choices,
    )


def _grammar_from_proto(message: worker_pb2.Grammar) -> Constraint:
    return Constraint(
        backend=GrammarBackend(message.backend),
        form=ConstraintForm(message.form),
        text=message.text,
        choices=tuple(message.choices),
    )
