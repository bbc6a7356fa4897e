"""Admission: what a client sent becomes a request that workers can be trusted with, or an error that says all.

    check the fields  ->  tokenize or render (in a thread)  ->  check the lengths  ->  resolve every default

A field that is left out takes the model's own default (generation_config.json) and failing that the API's.
"""

from __future__ import annotations

from router.admission.admit import Admission
from router.admission.defaults import kind_of, resolve_max_tokens, resolve_sampling
from router.admission.prompts import tokenize
from router.admission.rules import check_fields, check_input

__all__ = [
    "Admission",
    "check_fields",
    "check_input",
    "kind_of",
    "resolve_max_tokens",
    "resolve_sampling",
    "tokenize",
]
