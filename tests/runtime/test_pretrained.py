"""Loading by transformers: whatever it raises is one refusal, and its reports stay as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

from specctl.errors import ModelError
from specctl.runtime.identity import quietly


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("\nno backend\nand 60 lines more"), "found ValueError: no backend;"),
        (AssertionError(), "found AssertionError;"),
        (KeyError("x"), "found KeyError: 'x';"),
    ],
    ids=repr,
)
def test_every_failure_is_named_on_one_line(error: Exception, says: str, tmp_path: Path) -> None:
    class Factory:
        @staticmethod
        def from_pretrained(*_: Any, **__: Any) -> None:
            raise error

    before = logging.get_verbosity()
    with pytest.raises(ModelError) as refused:
        quietly(Factory, tmp_path)
    assert says in str(refused.value)
    assert refused.value.__cause__ is error
    assert logging.get_verbosity() == before
