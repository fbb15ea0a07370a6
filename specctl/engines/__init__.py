"""Serving engines: what they can be told, what they log, and a plugin that runs inside vLLM."""

import os

from specctl.engines.settings import VARIABLE


def register() -> None:
    """The entry point `vllm.general_plugins`, called in every process of the engine, and maybe more
    than once: nothing, not even an import, where the variable is not set.

    Raises:
        EngineError: settings that cannot be read, or a vLLM in which the plugin cannot work.
    """
    if os.environ.get(VARIABLE):
        from specctl.engines import vllm_plugin

        vllm_plugin.register()
