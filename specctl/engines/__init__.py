"""Serving engines: their settings, files of flags, and a plugin that runs inside vLLM."""

import os

from specctl.engines.settings import VARIABLE


def register() -> None:
    """The entry point `vllm.general_plugins`: starts the plugin if the variable is set.

    vLLM calls it in every process, possibly more than once. Without the variable it imports
    nothing.

    Raises:
        EngineError: settings that cannot be read, or a vLLM that the plugin does not support.
    """
    if os.environ.get(VARIABLE):
        from specctl.engines import vllm_plugin

        vllm_plugin.register()
