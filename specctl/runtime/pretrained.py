"""Loading by transformers' own code: quiet, local, its failures named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.errors import ModelError


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint.

    Raises:
        ModelError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    return quietly(AutoTokenizer, folder)


def quietly(factory: Any, folder: Path, **options: Any) -> Any:
    """What a factory of transformers loads from a folder, its progress bars and reports off.

    Raises:
        ModelError: it cannot.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its loading report is many lines
    try:
        return factory.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:  # whatever a foreign checkpoint raises
        raise ModelError(
            f"{factory.__name__} of {folder}",
            expected="a checkpoint that transformers can load",
            found=": ".join(filter(None, (type(error).__name__, first_line(error)))),
            fix="check the folder with transformers itself",
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def first_line(error: Exception) -> str:
    """What an error says, without the advice that follows; at most 200 characters."""
    return str(error).strip().partition("\n")[0][:200]
