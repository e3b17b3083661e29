"""Data sets that `data=NAME` stands for. Nothing here imports torch, because `--help` lists them."""

# Name -> what it is, the choice of conf/data that reads it, and the keys of that choice.
DATA_SETS = {
    "gsm8k": (
        "GSM8K: 7,473 problems of grade-school mathematics (arXiv:2110.14168).",
        "conversations",
        {"path": "openai/gsm8k", "name": "main"},
    ),
    "magicoder": (
        "Magicoder: 75,000 code problems (arXiv:2312.02120).",
        "conversations",
        {"path": "ise-uiuc/Magicoder-OSS-Instruct-75K"},
    ),
    "mix": (
        "Conversations that the target writes, mixed with yours: data=mix data.conversations=FILE",
        "self",
        {"conversations": "???"},
    ),
    "sharegpt": (
        "ShareGPT: the conversations that Vicuna, Medusa and EAGLE were trained on.",
        "conversations",
        {
            "path": "anon8231489123/ShareGPT_Vicuna_unfiltered",
            "data_files": "ShareGPT_V3_unfiltered_cleaned_split.json",
        },
    ),
    "ultrachat": (
        "UltraChat-200k: conversations of several turns (arXiv:2305.14233).",
        "conversations",
        {"path": "HuggingFaceH4/ultrachat_200k", "split": "train_sft"},
    ),
}
