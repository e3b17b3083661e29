"""Data sets that `data=NAME` stands for. Nothing here imports torch, because `--help` lists them."""

# Name -> what it is, and the keys of data=conversations that read it.
DATA_SETS = {
    "gsm8k": (
        "GSM8K: 7,473 problems of grade-school mathematics (arXiv:2110.14168).",
        {"path": "openai/gsm8k", "name": "main"},
    ),
    "magicoder": (
        "Magicoder: 75,000 code problems (arXiv:2312.02120).",
        {"path": "ise-uiuc/Magicoder-OSS-Instruct-75K"},
    ),
    "sharegpt": (
        "ShareGPT: the conversations that Vicuna, Medusa and EAGLE were trained on.",
        {
            "path": "anon8231489123/ShareGPT_Vicuna_unfiltered",
            "data_files": "ShareGPT_V3_unfiltered_cleaned_split.json",
        },
    ),
    "ultrachat": (
        "UltraChat-200k: conversations of several turns (arXiv:2305.14233).",
        {"path": "HuggingFaceH4/ultrachat_200k", "split": "train_sft"},
    ),
}
