"""Takes conversations and the target's tokenizer, gives prepared rows (TokenRows) and the target's answers; knows no model."""
