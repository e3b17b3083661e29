"""From sources to packed rows: files and the Hub, chat template and loss mask, self-generated text, packing."""
