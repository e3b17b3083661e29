"""Chat templates: those of real models (chat_templates/), two written short, and tokenizers that know their tokens."""

from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foredraft.train.data.chat_template import ChatFormat

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(
    template: str | None, bos: str = "<s>", eos: str = "</s>", special: list[str] = SPECIAL
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos, eos_token=eos)
    fast.chat_template = template
    return fast


class Model(NamedTuple):
    bos: str
    end: str  # of a turn
    special: str  # tokens, with a space between them
    eos: str = ""  # where it is another than `end`


MODELS = {
    "deepseek_r1": Model(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜>",
    ),
    "deepseek_v3_1": Model(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        (
            "<｜User｜> <｜Assistant｜> <think> </think> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> "
            "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜> <｜tool▁sep｜>"
        ),
    ),
    "gemma3": Model("<bos>", "<end_of_turn>", "<start_of_turn>"),
    "gemma4": Model(
        "<bos>",
        "<turn|>",
        (
            "<|turn> <|channel> <channel|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> "
            '<|think|> <|tool> <tool|> <|"|>'
        ),
        "<eos>",
    ),
    "glm4_5": Model("[gMASK]", "<|user|>", "<sop> <|system|> <|assistant|> <|observation|>", "<|endoftext|>"),
    "glm5": Model("[gMASK]", "<|user|>", "<sop> <|system|> <|assistant|> <|observation|>", "<|endoftext|>"),
    "gpt_oss": Model("<|startoftext|>", "<|return|>", "<|start|> <|message|> <|channel|> <|end|> <|call|>"),
    "granite4": Model("<|end_of_text|>", "<|end_of_text|>", "<|start_of_role|> <|end_of_role|> <tool_call>"),
    "kimi_k2": Model(
        "[BOS]",
        "<|im_end|>",
        (
            "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|tool_calls_section_begin|> "
            "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>"
        ),
        "[EOS]",
    ),
    "llama3": Model("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|> <|end_header_id|> <|python_tag|>"),
    "llama4": Model(
        "<|begin_of_text|>",
        "<|eot|>",
        ("<|header_start|> <|header_end|> <|python_start|> <|python_end|>"),
    ),
    "minimax_m2": Model("]~!b[", "[e~[", "]~b] <think> </think> <minimax:tool_call> </minimax:tool_call>"),
    "mistral": Model("<s>", "</s>", "[INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]"),
    "phi3": Model("<s>", "<|end|>", "<|user|> <|assistant|> <|system|>", "<|endoftext|>"),
    "phi4": Model("<|endoftext|>", "<|im_end|>", "<|im_start|> <|im_sep|>"),
    "qwen3": Model("<|endoftext|>", "<|im_end|>", "<|im_start|> <think> </think> <tool_call> </tool_call>"),
    "qwen3_5": Model("<|endoftext|>", "<|im_end|>", "<|im_start|> <think> </think> <tool_call> </tool_call>"),
    "qwq": Model("<|endoftext|>", "<|im_end|>", "<|im_start|> <think> </think> <tool_call> </tool_call>"),
    "smollm2": Model("<|im_start|>", "<|im_end|>", ""),
    "smollm3": Model("<|begin_of_text|>", "<|im_end|>", "<|im_start|> <think> </think>"),
}


def form_of(model: str, **settings) -> ChatFormat:
    bos, end, special, eos = MODELS[model]
    template = (Path(__file__).parent / "chat_templates" / f"{model}.jinja").read_text()
    return ChatFormat(tokenizer(template, bos, eos or end, [bos, end, *special.split(), *eos.split()]), **settings)
