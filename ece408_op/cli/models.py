"""`ece408 models`: measures the shipped models."""

from __future__ import annotations

import argparse
from typing import Any

from tqdm import tqdm

from .. import settings
from ..course import course_terms, model_card
from ..files.cachedir import write_text
from ..operator import variables
from . import arguments


def add(commands: Any) -> None:
    """Add `ece408 models`."""
    parser = arguments.add_command(commands, "models", "measure the shipped models")
    parser.option("--term TERM", "only this term's (may be repeated)", action="append")
    parser.option("--output FILE", "also write models/README.md's text to FILE")
    arguments.add_data(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    variables.set_environment()
    settings.configure(data=options.data)
    terms = [course_terms.find_term(name) for name in options.term or course_terms.TERMS]
    chosen = [(term, model) for term in terms for model in term.models]
    progress = tqdm(chosen, unit="model", disable=None)
    cards = [model_card.measure(term, model) for term, model in progress]
    print(model_card.table(cards))
    if options.output is not None:
        write_text(options.output, model_card.document(cards))
