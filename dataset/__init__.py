"""The data: record files, record formats, tokenization, datasets and data order.

The files of this folder:

    record_files.py     files -> records by number: JSONL, JSON, text, gzip, Parquet, a folder or a hub name
    formats.py          records -> prompts, demonstrations, preference pairs, rated answers, by their keys
    answers.py          the number that an answer gives; which answers a response can equal
    turns.py            turns of conversations, transcripts, calls of tools
    keys.py             --prompt_key and its like: keys that the user names
    tokenization.py     conversations -> text (chat template) -> token ids
    special_tokens.py   special tokens that a text spells out stay text
    prompt_template.py  --prompt_template: gives a tokenizer a chat template
    lm_dataset.py       the datasets of PPO, stage 1 and stage 2; drops records that are too long
    logged_answers.py   the dataset of offline PPO: answers with their scores
    data_order.py       the order of records: epochs, batches, each process' share, data loader
    demo/               the demo's data and tokenizer, and the scripts that make them
"""
