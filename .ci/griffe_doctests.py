"""Puts doctests of docstrings into code blocks: Markdown would read `>>>` as a quotation."""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """A block begins with `>>>` and ends before the next empty line."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = _DOCTEST.sub(
                lambda block: f"```pycon\n{block[0]}\n```", obj.docstring.value
            )
            obj.docstring.value = text
