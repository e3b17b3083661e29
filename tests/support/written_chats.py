"""Conversations, and what each family of models writes in them: found by hand, from its documentation."""

from datetime import date

from tests.support.chats import MODELS


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "description": "Adds."}}
CALL = {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CONVERSATIONS = {
    "one turn": [user("What is 2 + 3?"), assistant("It is 5.")],
    "a system prompt": [{"role": "system", "content": "Be brief."}, user("What is 2 + 3?"), assistant("It is 5.")],
    "two turns": [user("What is 2 + 3?"), assistant("It is 5."), user("And 4 more?"), assistant("Then 9.\n\nReally.")],
    "reasoning": [user("What is 2 + 3?"), assistant("It is 5.", reasoning_content="2 and 3.")],
    "reasoning, two turns": [
        user("What is 2 + 3?"),
        assistant("It is 5.", reasoning_content="2 and 3."),
        user("And 4 more?"),
        assistant("Then 9.", reasoning_content="5 and 4."),
    ],
    "reasoning in the text": [user("What is 2 + 3?"), assistant("<think>\n2 and 3.\n</think>\n\nIt is 5.")],
    "a tool": [
        user("What is 2 + 3?"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "5", "tool_call_id": "123456789"},
        assistant("It is 5."),
    ],
}
CONVERSATIONS["reasoning and a tool"] = [
    message | ({"reasoning_content": thought} if thought else {})
    for message, thought in zip(CONVERSATIONS["a tool"], ["", "Call it.", "", "2 and 3."], strict=True)
]
PLAIN = {
    "one turn": ["It is 5."],
    "a system prompt": ["It is 5."],
    "two turns": ["It is 5.", "Then 9.\n\nReally."],
}
TWO_THOUGHTS = [("2 and 3.", "It is 5."), ("5 and 4.", "Then 9.")]
THOUGHTS_FIRST = {
    "reasoning": ["2 and 3.\n</think>\n\nIt is 5."],  # the generation prompt opens the reasoning
    "reasoning, two turns": [f"{thought}\n</think>\n\n{answer}" for thought, answer in TWO_THOUGHTS],
    "reasoning in the text": ["2 and 3.\n</think>\n\nIt is 5."],
}
SHORT = {
    "reasoning": ["2 and 3.</think>It is 5."],
    "reasoning, two turns": [f"{thought}</think>{answer}" for thought, answer in TWO_THOUGHTS],
    "reasoning in the text": ["2 and 3.</think>It is 5."],
}
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a": 2, "b": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
GLM_CALL = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n"
    "</tool_call><|observation|>"
)
QWEN_ARGUMENTS = "<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
QWEN_XML = f"<tool_call>\n<function=add>\n{QWEN_ARGUMENTS}</function>\n</tool_call>"
WROTE: dict[str, dict[str, list[str]]] = {  # without the end of the turn
    "llama3": PLAIN | {"a tool": ['{"name": "add", "parameters": {"a": 2, "b": 3}}', "It is 5."]},
    "gemma3": PLAIN,
    "smollm2": PLAIN,
    "mistral": PLAIN
    | {"a tool": ['[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "123456789"}]', "It is 5."]},
    "qwen3": PLAIN
    | {
        "reasoning": ["<think>\n2 and 3.\n</think>\n\nIt is 5."],
        "reasoning, two turns": [f"<think>\n{thought}\n</think>\n\n{answer}" for thought, answer in TWO_THOUGHTS],
        "reasoning in the text": ["<think>\n2 and 3.\n</think>\n\nIt is 5."],
        "reasoning and a tool": [
            f"<think>\nCall it.\n</think>\n\n{QWEN_CALL}",
            "<think>\n2 and 3.\n</think>\n\nIt is 5.",
        ],
        "a tool": [QWEN_CALL, "It is 5."],
    },
    "qwq": THOUGHTS_FIRST
    | {
        "reasoning and a tool": [f"Call it.\n</think>\n\n{QWEN_CALL}", "2 and 3.\n</think>\n\nIt is 5."],
    },
    "deepseek_r1": THOUGHTS_FIRST,
    "deepseek_v3_1": PLAIN
    | SHORT
    | {
        "a tool": [DEEPSEEK_CALL, "It is 5."],
        # After a tool's result the prompt opens no reasoning, and the template shows none.
        "reasoning and a tool": ["Call it.</think>" + DEEPSEEK_CALL, "It is 5."],
    },
    "gemma4": PLAIN  # which only shows reasoning before calls
    | {
        "reasoning": ["It is 5."],
        "a tool": ["<|tool_call>call:add{a:2,b:3}<tool_call|><|tool_response>", "It is 5."],
        "reasoning and a tool": [
            "<|channel>thought\nCall it.\n<channel|><|tool_call>call:add{a:2,b:3}<tool_call|><|tool_response>",
            "It is 5.",
        ],
    },
    "glm4_5": {name: [f"\n{answer}" for answer in answers] for name, answers in PLAIN.items()}
    | {
        "reasoning": ["\n<think>2 and 3.</think>\nIt is 5."],
        "reasoning, two turns": [f"\n<think>{thought}</think>\n{answer}" for thought, answer in TWO_THOUGHTS],
        "reasoning in the text": ["\n<think>2 and 3.</think>\nIt is 5."],
        "a tool": [f"\n{GLM_CALL}", "\nIt is 5."],
        "reasoning and a tool": [
            f"\n<think>Call it.</think>\n{GLM_CALL}",
            "\n<think>2 and 3.</think>\nIt is 5.",
        ],
    },
    "glm5": PLAIN
    | SHORT
    | {
        "a tool": [GLM_CALL.replace("\n", ""), "It is 5."],
        "reasoning and a tool": ["Call it.</think>" + GLM_CALL.replace("\n", ""), "2 and 3.</think>It is 5."],
    },
    "granite4": PLAIN | {"a tool": [QWEN_CALL, "It is 5."]},
    "kimi_k2": PLAIN
    | {
        "a tool": [
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": 2, "b": 3}<|tool_call_end|><|tool_calls_section_end|>',
            "It is 5.",
        ]
    },
    "llama4": PLAIN | {"a tool": ['{"name": "add", "parameters": {"a": 2, "b": 3}}', "It is 5."]},
    "minimax_m2": THOUGHTS_FIRST
    | {
        "reasoning and a tool": [
            'Call it.\n</think>\n\n\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">2</parameter>\n'
            '<parameter name="b">3</parameter>\n</invoke>\n</minimax:tool_call>',
            "2 and 3.\n</think>\n\nIt is 5.",
        ]
    },
    "phi3": PLAIN,
    "phi4": PLAIN,
    "qwen3_5": PLAIN
    | THOUGHTS_FIRST
    | {
        "a tool": [QWEN_XML, "It is 5."],
        "reasoning and a tool": [f"Call it.\n</think>\n\n{QWEN_XML}", "2 and 3.\n</think>\n\nIt is 5."],
    },
    "smollm3": PLAIN
    | {
        "reasoning": ["<think>\n2 and 3.\n</think>\n\nIt is 5."],
        "reasoning, two turns": [f"<think>\n{thought}\n</think>\n\n{answer}" for thought, answer in TWO_THOUGHTS],
        "reasoning in the text": ["<think>\n2 and 3.\n</think>\n\nIt is 5."],
        "a tool": ["It is 5."],  # the template shows no calls
    },
    "gpt_oss": {name: [f"<|channel|>final<|message|>{answer}" for answer in answers] for name, answers in PLAIN.items()}
    | {
        "reasoning": [
            "<|channel|>analysis<|message|>2 and 3.<|end|><|start|>assistant<|channel|>final<|message|>It is 5."
        ],
        "reasoning, two turns": [
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{answer}"
            for thought, answer in TWO_THOUGHTS
        ],
        "a tool": [
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>',
            "<|channel|>final<|message|>It is 5.",
        ],
        "reasoning and a tool": [
            "<|channel|>analysis<|message|>Call it.<|end|>"
            '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>',
            "<|channel|>analysis<|message|>2 and 3.<|end|><|start|>assistant<|channel|>final<|message|>It is 5.",
        ],
    },
}
QUESTION = "What is 2 + 3?"
CHATML = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = {  # the one of the first turn, whole
    "deepseek_r1": f"<｜begin▁of▁sentence｜><｜User｜>{QUESTION}<｜Assistant｜><think>\n",
    "gemma3": f"<bos><start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n",
    "gpt_oss": "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    f"Knowledge cutoff: 2024-06\nCurrent date: {date.today()}\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
    f"<|start|>user<|message|>{QUESTION}<|end|><|start|>assistant",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    f"{QUESTION}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": f"<s>[INST]{QUESTION}[/INST]",
    "qwen3": CHATML,
    "qwq": f"{CHATML}<think>\n",
    "smollm2": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    + CHATML,
    "deepseek_v3_1": f"<｜begin▁of▁sentence｜><｜User｜>{QUESTION}<｜Assistant｜></think>",
    "gemma4": f"<bos><|turn>user\n{QUESTION}<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
    "glm4_5": f"[gMASK]<sop><|user|>\n{QUESTION}<|assistant|>",
    "glm5": f"[gMASK]<sop><|user|>{QUESTION}<|assistant|><think>",
    "granite4": f"<|start_of_role|>user<|end_of_role|>{QUESTION}<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "kimi_k2": "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
    f"<|im_user|>user<|im_middle|>{QUESTION}<|im_end|><|im_assistant|>assistant<|im_middle|>",
    "llama4": f"<|begin_of_text|><|header_start|>user<|header_end|>\n\n{QUESTION}<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\n",
    "minimax_m2": f"]~!b[]~b]system\nYou are a helpful assistant.[e~[\n]~b]user\n{QUESTION}[e~[\n]~b]ai\n<think>\n",
    "phi3": f"<|user|>\n{QUESTION}<|end|>\n<|assistant|>\n",
    "phi4": f"<|im_start|>user<|im_sep|>{QUESTION}<|im_end|><|im_start|>assistant<|im_sep|>",
    "qwen3_5": f"{CHATML}<think>\n",
    "smollm3": "<|im_start|>system\n## Metadata\n\nReasoning Mode: /think\n\n## Custom Instructions\n\n"
    f"You are a helpful AI assistant named SmolLM, trained by Hugging Face.\n\n<|im_end|>\n{CHATML}",
}
ENDS = ("<|call|>", "<|observation|>", "<|tool_response>")  # of an answer that is a call


def wrote(model: str, name: str) -> list[str]:
    """Return all that the model emits, answer by answer."""
    return [text if text.endswith(ENDS) else text + MODELS[model].end for text in WROTE[model][name]]
