"""llama.cpp's server in this process, by the wheel `xllamacpp`, or a running one by its address."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from specctl.engines.llamacpp_flags import CHECKED_BUILD, LlamaServer
from specctl.errors import EngineError, one_line, reason_of

