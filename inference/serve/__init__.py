"""An OpenAI-compatible server over the engine, for one machine.

protocol.py     what a request may say, and what is refused by name
prompts.py      messages and prompts to tokens
tools.py        tool calls: read out of a text, and forced by a grammar
reasoning.py    thoughts, told apart from the answer
detokenizer.py  text that may be shown; logprobs.py: of its tokens
worker.py       the thread that owns the engine
scoring.py      log-probabilities of a prompt's own tokens, between its steps
completion.py   one answer: its text, log-probabilities and usage, in OpenAI's words
learning.py     learn=true: the head follows the traffic (traffic.py), by background.py; learned.py has the heads
accepted_log.py what became of drafts, for training, where it is asked for
vllm.py         the same by vLLM, with the exported head
service.py      a request on its way through all that
app.py          the routes; limits.py, metrics.py: what surrounds them; page.html: the page at /
"""
