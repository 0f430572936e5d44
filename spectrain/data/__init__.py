"""Chats and what is made of them: rows with masks, held-out splits, features, batches."""
