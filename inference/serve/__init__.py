"""An OpenAI-compatible server for one machine, based on the engine.

protocol.py     the fields of requests, and those that are refused by name
prompts.py      converts messages and prompts to tokens
tools.py        tool calls: parsed from a text, and forced by a grammar
reasoning.py    reasoning, separated from the answer
stop_strings.py text that may be shown; logprobs.py: log-probabilities of its tokens
worker.py       the thread that owns the engine
echo.py         a prompt in front of its answer, with log-probabilities, which are computed between steps
choice.py       one text of an answer; completion.py: the whole answer and its usage, in OpenAI's format
accepted_log.py a log of accepted drafts, for training; followed_head.py: the head may change (train/learn.py)
other_engines.py the same API with vLLM or llama.cpp, which use the exported head
service.py      the path of a request through these modules
app.py          the routes, with limits.py and metrics.py around them; page.html: the page at /
"""
