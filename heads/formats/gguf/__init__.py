"""GGUF, the one file that llama.cpp's server loads as a draft model (`llama-server -m TARGET.gguf -md head.gguf`)."""
