"""An OpenAI-compatible server for one machine, based on the engine.

app.py        the routes; limits.py checks requests before them, and errors.py has OpenAI's format of errors
service.py    the path of a request: prompts, grammar and echo, then the worker, then an answer, metrics and logs
worker.py     the thread that owns the engine; cache_budget.py: how many texts fit
openai/       the protocol: requests to prompts (protocol.py, prompts.py), outputs to one text with reasoning and tool calls
              (choice.py), texts to an answer of either API (completion.py, responses.py)
accepted_log.py, followed_head.py    learning from traffic: what is logged, and the head that may change (train/learn.py)
other_engines.py                     the same API with vLLM or llama.cpp, which use the exported head
"""
