"""SmolLM2-135M-Instruct in llama.cpp, from its wheel to a table: `make smollm2`."""
